"""Completion of commands and options, as a shell asks for it."""

import pytest

from raymoe.cli import COMMANDS, run


def ask(monkeypatch, capsys, *words):
    monkeypatch.setenv("_RAYMOE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(("raymoe", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert run([]) == 0
    return capsys.readouterr().out.split()


def test_commands_and_options_are_completed(monkeypatch, capsys):
    assert ask(monkeypatch, capsys, "") == [*COMMANDS]
    assert ask(monkeypatch, capsys, "st") == ["status"]
    assert ask(monkeypatch, capsys, "status", "--wa") == ["--watch"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_shown(monkeypatch, capsys, shell):
    # Without it the shell is looked for among the parents of this process.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    run(["--show-completion", shell])
    assert "_RAYMOE_COMPLETE" in capsys.readouterr().out
