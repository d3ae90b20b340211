"""`raymoe compare`: every schedule predicted and measured, and what the pictures hold."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import transformers

from raymoe.cli import run
from raymoe.cli.compare import Comparison, DecodeBatch, compare_schedules
from raymoe.errors import ConfigError
from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.graph import Op, Resource
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.presets_models import model_preset
from tests.unit.schedule.figure_6 import (
    gpu_share_during_cpu_attention,
    share_of_gpu_idle_time_spent_on,
)


def make_stand_in(directory: Path, num_layers: int) -> Path:
    """A Mixtral that computes in no time, with as many layers as a large one."""
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=64,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        directory
    )
    return directory


@pytest.mark.slow
def test_the_command_runs_every_schedule_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_stand_in(tmp_path / "model", 2)
    code = run(
        ["compare", "--model", str(model), "--hardware", "t4", "--num-micro-batches", "3",
         "--micro-batch-rows", "2", "--context", "40", "--resident-share", "0.5", "--page-bytes",
         "1KiB", "--cpu-attention-fraction", "0.5", "--out", str(tmp_path / "out")]
    )  # fmt: skip
    assert code == 0
    table = capsys.readouterr().out
    for name in STREAMING_BUILDERS:
        assert name in table
    assert max(map(len, table.splitlines())) <= 80
    assert "\u2026" not in table, "nothing is cut"
    root = ET.parse(tmp_path / "out" / "schedules.svg").getroot()
    assert root.tag.endswith("svg")
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {
        f"{name}, {kind}" for name in STREAMING_BUILDERS for kind in ("predicted", "measured")
    }
    code = run(
        ["compare", "--model", str(model), "--schedule", "cgopipe", "--num-micro-batches", "2",
         "--micro-batch-rows", "1", "--context", "40", "--out", str(tmp_path / "out"), "--json"]
    )  # fmt: skip
    assert code == 0
    (one,) = json.loads(capsys.readouterr().out)["schedules"]
    assert one["schedule"] == "cgopipe"
    assert one["measured_s"] > 0


def test_a_size_that_is_none_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "--model", "nowhere", "--page-bytes", "3 parsec"]) == 2
    assert "is not a size" in " ".join(capsys.readouterr().err.split())


def test_an_unknown_schedule_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["compare", "--model", "nowhere", "--schedule", "cgopip"]) == 2
    assert "cgopipe" in capsys.readouterr().err


def test_the_model_that_sets_the_pace_has_enough_layers(tmp_path: Path) -> None:
    model = make_stand_in(tmp_path / "model", 33)
    with pytest.raises(ConfigError, match=r"has 32 layers; it needs at least the 33 "):
        next(
            compare_schedules(
                model,
                hardware_preset("t4"),
                ["cgopipe"],
                DecodeBatch(),
                costs_of=model_preset("mixtral-8x7b"),
            )
        )


@pytest.fixture(scope="module")
def mixtral_stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stand_in(tmp_path_factory.mktemp("stand-in"), 32)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["t4", "l4", "a5000"])
def test_what_is_predicted_happens(mixtral_stand_in: Path, hardware: str, tmp_path: Path) -> None:
    comparisons = list(
        compare_schedules(
            mixtral_stand_in,
            hardware_preset(hardware),
            list(STREAMING_BUILDERS),
            DecodeBatch(),
            costs_of=model_preset("mixtral-8x7b"),
            time_scale=2.0,  # the shortest tasks take the interpreter longer than a GPU
        )
    )
    lines = "\n".join(map(_line, comparisons))
    (tmp_path / "comparison.txt").write_text(lines)
    by_name = {each.name: each for each in comparisons}
    assert max(abs(each.gap) for each in comparisons) <= 0.05
    best = max(
        (by_name[name] for name in ("cgopipe", "vslpipe", "module_batching")),
        key=lambda each: each.tokens_per_s,
    )
    assert best.measured.utilization(Resource.HTOD) >= 0.95
    s3, s4 = by_name["flexgen_s3"], by_name["flexgen_s4"]
    assert max(s3.tokens_per_s, s4.tokens_per_s) < best.tokens_per_s
    assert gpu_share_during_cpu_attention(s3.measured) < 0.02
    assert share_of_gpu_idle_time_spent_on(s4.measured, Op.KV, Op.W) > 0.95


def _line(each: Comparison) -> str:
    busy = {
        str(lane): round(each.measured.utilization(lane), 2) for lane in each.measured.resources
    }
    return (
        f"{each.name}: predicted {each.predicted.makespan_s:.3f} s, measured "
        f"{each.measured.makespan_s:.3f} s, gap {100 * each.gap:+.1f} %, "
        f"{each.tokens_per_s:.1f} tokens/s, {busy}"
    )
