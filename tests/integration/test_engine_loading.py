"""From a directory to an engine: what is read, what is refused, and when."""

import dataclasses
import json
import logging
import shutil
import threading

import pytest

from raymoe.config import EngineConfig
from raymoe.device.host import read_host
from raymoe.engine import node
from raymoe.engine.engine import Engine
from raymoe.errors import (
    CheckpointError,
    ConfigError,
    InfeasiblePlanError,
    UnknownOptionError,
    UnsupportedModelError,
)
from raymoe.measure.kept import identify_machine, store_profile
from raymoe.plan.policy import Choice, DevicePolicy, Policy
from raymoe.specs.hardware import HardwareSpec, MeasuredNode
from raymoe.units import GIB, MIB
from tests.parity.configurations import CONFIGURATIONS
from tests.parity.oracle import make_checkpoint
from tests.unit.engine.fakes import write_byte_tokenizer

SMALL = EngineConfig(host_memory_bytes=2 * GIB, linger_s=0.0)
GREEDY = {"temperature": 0, "max_tokens": 12}
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(CONFIGURATIONS[0], directory)
    return directory


@pytest.fixture
def directory(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def edit(path, **fields) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | fields))


def tokens(directory, params=GREEDY, config=SMALL):
    with Engine.from_pretrained(directory, config) as engine:
        (generation,) = engine.generate([PROMPT], params)
        assert generation.error == ""
        return generation


@pytest.mark.parametrize("as_list", [True, False])
def test_eos_of_generation_config_ends_a_row(directory, as_list):
    plain = tokens(directory).token_ids
    eos = plain[5]
    edit(directory / "generation_config.json", eos_token_id=[198, eos] if as_list else eos)
    generation = tokens(directory)
    assert generation.token_ids == plain[: plain.index(eos) + 1]
    assert generation.finish_reason == "stop"
    assert tokens(directory, GREEDY | {"ignore_eos": True}).token_ids == plain


def test_eos_of_config_counts_where_generation_config_has_none(directory):
    plain = tokens(directory).token_ids
    edit(directory / "config.json", eos_token_id=plain[3])
    (directory / "generation_config.json").unlink(missing_ok=True)
    assert tokens(directory).token_ids == plain[: plain.index(plain[3]) + 1]


@pytest.mark.parametrize("value", ["2", -1, 2**31, [2, None], {"id": 2}])
def test_eos_that_is_no_token_is_refused_by_the_name_of_its_file(directory, value):
    edit(directory / "generation_config.json", eos_token_id=value)
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is"):
        Engine.from_pretrained(directory, SMALL)


def test_text_prompts_use_the_tokenizer_of_the_directory(directory):
    write_byte_tokenizer(directory)
    with Engine.from_pretrained(directory, SMALL) as engine:
        good, bad = engine.generate(["abc", "\u00ff"], GREEDY)
    # The model has 199 tokens: BOS (256) is not one of them, and the row says so.
    assert "the vocabulary has ids 0 to 198" in good.error
    assert "the vocabulary has ids 0 to 198" in bad.error


def test_too_little_memory_is_refused_with_a_table(directory):
    config = EngineConfig(host_memory_bytes=200 * MIB)
    with pytest.raises(InfeasiblePlanError, match=r"(?s)short.*weights.*KV cache.*total"):
        Engine.from_pretrained(directory, config)


STREAMING = Policy(
    max_num_seqs=1,
    max_num_batched_tokens=8,
    max_prefill_chunk_tokens=8,
    num_kv_blocks=1,
    device=DevicePolicy(),
)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (EngineConfig(schedule="in_plac"), UnknownOptionError, "did you mean 'in_place'"),
        (EngineConfig(dtype="bfloat16", kv_dtype="float32"), ConfigError, "kv_dtype is 'float32'"),
        (EngineConfig(hardware="absent.json"), ConfigError, "hardware file absent.json: cannot"),
        (EngineConfig(hardware="l4"), ConfigError, "sets the pace of the device 'emulated'"),
        (EngineConfig(policy=STREAMING), ConfigError, "the device 'cpu' has no memory of its own"),
    ],
)
def test_what_is_not_there_yet_is_refused(directory, config, error, message):
    with pytest.raises(error, match=message):
        Engine.from_pretrained(directory, config)


NODE = HardwareSpec(
    name="kept",
    num_cores=1,
    host_memory_bytes=3 * GIB,
    host_bytes_per_s=1e9,
    host_flop_per_s=1e9,
)


def planned_with(directory, **options) -> HardwareSpec:
    with Engine.from_pretrained(directory, EngineConfig(linger_s=0.0, **options)) as engine:
        return engine.plan.hardware


def test_the_kept_profile_of_this_machine_is_planned_with(directory, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYMOE_CACHE", str(tmp_path))
    store_profile(tmp_path, identify_machine(1), NODE)
    for hardware in (None, "auto"):
        node = planned_with(directory, num_threads=1, hardware=hardware)
        assert (node.name, node.host_bytes_per_s) == ("kept", 1e9)
        assert 0 < node.host_memory_bytes <= 0.85 * read_host().total_memory_bytes
    budget = planned_with(directory, num_threads=1, host_memory_bytes=2 * GIB)
    assert (budget.name, budget.host_memory_bytes) == ("kept", 2 * GIB)
    assert planned_with(directory, num_threads=2).name != "kept"


def test_a_hardware_file_is_planned_with_as_it_is(directory, tmp_path):
    NODE.to_file(tmp_path / "node.json")
    assert planned_with(directory, hardware=str(tmp_path / "node.json")) == NODE
    assert planned_with(directory, hardware=NODE) == NODE


def test_an_unknown_architecture_is_refused(directory):
    edit(directory / "config.json", model_type="gigantic_moe")
    with pytest.raises(UnsupportedModelError, match="gigantic_moe"):
        Engine.from_pretrained(directory, SMALL)


def test_a_truncated_checkpoint_is_refused_by_file(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Engine.from_pretrained(directory, SMALL)


def test_a_refused_model_leaves_no_thread_behind(directory):
    before = set(threading.enumerate())
    with pytest.raises(InfeasiblePlanError):
        Engine.from_pretrained(directory, EngineConfig(host_memory_bytes=MIB))
    assert set(threading.enumerate()) <= before


def test_plan_and_timeline_are_there_to_be_compared(directory, caplog):
    with (
        caplog.at_level(logging.INFO, logger="raymoe"),
        Engine.from_pretrained(directory, SMALL) as engine,
    ):
        engine.generate([PROMPT], GREEDY)
        assert engine.plan.decode.makespan_s > 0
        assert len(engine.last_timeline.spans) == len(engine.plan.decode.spans)
    assert "predicted" in caplog.text


def test_dtype_and_cache_type_can_be_chosen(directory):
    config = EngineConfig(
        host_memory_bytes=2 * GIB, dtype="float32", kv_dtype="bfloat16", max_model_len=40
    )
    assert tokens(directory, GREEDY | {"max_tokens": 100}, config).num_generated_tokens == 35


def test_an_engine_reports_its_plan_beside_what_it_took(directory):
    with Engine.from_pretrained(directory, SMALL) as engine:
        assert engine.last_report is None
        engine.generate([[1, 2, 3]] * 4, {"max_tokens": 5, "ignore_eos": True})
    assert engine.last_report is not None
    assert str(engine.last_report).startswith("5 steps: predicted ")
    assert engine.accuracy is not None
    assert set(engine.accuracy.correction.ratios) == {"decode", "prefill"}


def test_a_budget_beyond_what_is_free_is_refused_before_anything_is_taken(directory, monkeypatch):
    monkeypatch.setattr(node, "PATIENCE_S", 0.0)
    policy = Policy(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_prefill_chunk_tokens=64,
        num_kv_blocks=2**32 // 100,
    )
    config = EngineConfig(device="cpu", host_memory_bytes=2**50, policy=policy)
    with pytest.raises(InfeasiblePlanError, match="So much is free now"):
        Engine.from_pretrained(directory, config)


PLANNED = Choice(
    schedule="in_place",
    policy=Policy(
        max_num_seqs=3, max_num_batched_tokens=64, max_prefill_chunk_tokens=64, num_kv_blocks=20
    ),
)


def planned_engine(directory, caplog, planned, **options):
    """Policy of an engine that was handed a plan, and what it says of planning again."""
    config = dataclasses.replace(SMALL, device="cpu", planned=planned, **options)
    with caplog.at_level(logging.INFO), Engine.from_pretrained(directory, config) as engine:
        policy = engine.plan.policy
    return policy, [text for text in caplog.messages if text.startswith("planned again")]


def test_an_engine_takes_the_plan_of_a_driver_on_a_machine_like_its_own(directory, caplog):
    own = MeasuredNode(machine=identify_machine(None).file_name, hardware=read_node())
    assert planned_engine(directory, caplog, PLANNED, hardware=own) == (PLANNED.policy, [])
    huge = dataclasses.replace(
        PLANNED, policy=dataclasses.replace(PLANNED.policy, num_kv_blocks=10**9)
    )
    policy, said = planned_engine(directory, caplog, huge, hardware=own)
    assert policy.num_kv_blocks < 10**9
    assert len(said) == 1
    assert "does not fit here" in said[0]
    assert "GiB" in said[0]


def test_an_engine_on_another_machine_plans_itself_and_says_so(directory, caplog):
    other = MeasuredNode(machine="another.json", hardware=read_node())
    policy, said = planned_engine(directory, caplog, PLANNED, hardware=other)
    assert policy != PLANNED.policy
    assert said == ["planned again: this machine is not like that of the driver"]


def test_a_policy_of_the_user_comes_before_a_plan(directory, caplog):
    own = MeasuredNode(machine=identify_machine(None).file_name, hardware=read_node())
    given = dataclasses.replace(PLANNED.policy, max_num_seqs=2)
    policy, said = planned_engine(directory, caplog, PLANNED, hardware=own, policy=given)
    assert (policy, said) == (given, [])


def read_node() -> HardwareSpec:
    """This machine at rates of no interest."""
    host = read_host()
    return HardwareSpec(
        name="measured",
        num_cores=host.num_cores,
        host_memory_bytes=8 * GIB,
        host_bytes_per_s=3e10,
        host_flop_per_s=3e11,
    )
