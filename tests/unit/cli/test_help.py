"""Help texts are sentences that a terminal of 80 columns shows whole."""

import importlib

import pytest
import typer

from raymoe import cli

COMMANDS = ("plan", "profile", "doctor", "models", "bench", "compare")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_option_is_a_sentence(name: str) -> None:
    app = typer.Typer(add_completion=False)
    app.command()(importlib.import_module(f"raymoe.cli.{name}").run)
    for parameter in typer.main.get_command(app).params:
        text = getattr(parameter, "help", None) or ""
        first, *rest = text.split()
        assert len(rest) >= 3, f"{parameter.name}: {text}"
        assert first.isalpha(), f"{parameter.name}: {text}"
        assert first[0].isupper(), f"{parameter.name}: {text}"
        assert text.endswith("."), f"{parameter.name}: {text}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert cli.run([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if "…" in line] == []
    about = [line for line in lines if line.startswith(" ") and line.strip()]
    short = [line for line in about[1:-1] if len(line.rstrip()) < 40]
    assert len(short) <= 3, short  # the last lines of paragraphs
