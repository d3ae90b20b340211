"""`raymoe models`: what it lists is there, and what does not run is refused with reasons."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from raymoe.cli import run
from raymoe.specs.families import FAMILIES, TESTED_WITH, WRAPPERS
from raymoe.specs.presets_models import MODEL_PRESETS, model_preset
from raymoe.specs.quantization import METHODS
from raymoe.units import format_bytes
from tests.hub import used_hub
from tests.tiny import make_checkpoint

QUANTISED = b'{"quantization": {"quant_algo": "NVFP4"}}'


def words(text: str) -> str:
    """Text of tables without frames and line ends."""
    return " ".join(re.sub(r"[│┃╭╮╰╯─━┏┓┗┛┡┩╇┳├┤┼└┘┌┐┴]", " ", text).split())


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_it_lists_all_families_and_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    found = words(capsys.readouterr().out)
    for name in (*FAMILIES, *WRAPPERS, *METHODS, *MODEL_PRESETS, TESTED_WITH):
        assert f" {name}" in found


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_it_says_what_a_model_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = model_preset(name)
    code = run(["models", name])
    printed = capsys.readouterr()
    assert code in {0, 2}
    assert ("It runs" in printed.out) == (code == 0)
    assert ("does not compute" in printed.err) == (code == 2)
    found = words(printed.out)
    assert f"{spec.num_parameters / 1e9:,.1f} B, {spec.num_active_parameters / 1e9:,.1f} B" in found
    assert f"weights {format_bytes(spec.stored_bytes)}" in found
    assert f"{format_bytes(spec.kv_bytes_per_token(2))} in bfloat16" in found


def test_a_checkpoint_is_checked_tensor_by_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_checkpoint(tmp_path / "tiny")
    (file,) = directory.glob("*.safetensors")
    weights = load_file(file)
    assert run(["models", str(directory)]) == 0
    assert f"It runs; all {len(weights)} tensors" in words(capsys.readouterr().out)
    del weights["model.norm.weight"]
    save_file(weights, file)
    assert run(["models", str(directory)]) == 1
    printed = capsys.readouterr()
    assert "'model.norm.weight' of shape [64] is missing" in printed.err
    assert "It runs" not in printed.out


def test_a_configuration_alone_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path / "tiny")
    for file in directory.glob("*.safetensors"):
        file.unlink()
    config = directory / "config.json"
    assert run(["models", str(directory)]) == 0
    assert "has no weights" in words(capsys.readouterr().out)
    assert run(["models", str(config)]) == 0
    assert "2 of 4 experts, hidden 96" in words(capsys.readouterr().out)
    with used_hub(tmp_path / "hub") as hub:
        weights = {"model.safetensors": b"-", "hf_quant_config.json": QUANTISED}
        hub.put("org/name", {"config.json": config.read_bytes(), **weights})
        assert run(["models", "org/name"]) == 0
        downloaded = [path.rpartition("/")[2] for path in hub.downloads("")]
        assert downloaded == ["config.json", "hf_quant_config.json"]
    assert words(capsys.readouterr().out).startswith("org/name")


def test_what_is_not_understood_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mamba"}))
    assert run(["models", str(tmp_path)]) == 2
    assert "model_type 'mamba' is not supported; supported: " in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert run(["models", str(other)]) == 2
    assert "a file called config.json" in capsys.readouterr().err
    assert run(["models", "mixtral-8x7c"]) == 2
    assert "'mixtral-8x7b'" in capsys.readouterr().err

    assert run(["models", "org/name"]) == 1
    assert "OfflineModeIsEnabled" in capsys.readouterr().err


def test_json_has_what_the_tables_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert set(known["families"]) == {*FAMILIES, *WRAPPERS}
    assert run(["models", "mixtral-8x7b", "--json"]) == 0
    found, spec = json.loads(capsys.readouterr().out), model_preset("mixtral-8x7b")
    assert found["weight_bytes"] == spec.stored_bytes
    assert found["num_parameters"] == spec.num_parameters
