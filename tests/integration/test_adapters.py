"""Engines, generators and the command with an adapter: the tokens of the merged model."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from raymoe.cli import run
from raymoe.cli.generate import check_batch_options
from raymoe.cli.plan import _model
from raymoe.config import EngineConfig
from raymoe.data.generator import MoEGenerator
from raymoe.data.sizing import map_batches_kwargs, plan_actor
from raymoe.engine.engine import Engine
from raymoe.engine.identity import ModelIdentity, files_key
from raymoe.engine.rank_model import in_place_arena_bytes, open_weights, read_model
from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.memory.adapters import AdaptedWeights
from raymoe.memory.weights import WatchedWeights
from raymoe.safe_text import harmless
from raymoe.specs.hardware import hardware_preset
from raymoe.units import GIB, MIB
from tests.adapters import make_adapter
from tests.quantised_checkpoints import checkpoints
from tests.tiny import PAGED_POLICY, make_checkpoint, write_tokenizer

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PARAMS = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PROMPTS = ["one", "another one", "a third"]
SMALL = EngineConfig(
    device="cpu", dtype="float32", host_memory_bytes=4 * GIB, num_threads=1, linger_s=0.0
)


@dataclasses.dataclass(frozen=True)
class Directories:
    base: Path
    adapter: Path
    merged: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    root = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(root / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    fields = {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}
    merged = make_adapter(model, root / "adapter", r=4, lora_alpha=16, **fields)
    merged.save_pretrained(root / "merged")
    write_tokenizer(root / "merged")
    return Directories(base, root / "adapter", root / "merged")


def tokens(model: Path, config: EngineConfig = SMALL, **fields: Any) -> list[tuple[int, ...]]:
    with Engine.from_pretrained(model, dataclasses.replace(config, **fields)) as engine:
        return [tuple(one.token_ids) for one in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def expected(made: Directories) -> list[tuple[int, ...]]:
    found = tokens(made.merged)
    assert found != tokens(made.base)
    return found


def test_an_engine_with_an_adapter_gives_the_tokens_of_the_merged_model(
    made: Directories, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    assert tokens(made.base, adapter=made.adapter) == expected
    assert tokens(made.adapter) == expected  # which names its base
    both = shutil.copytree(made.base, tmp_path / "both")
    shutil.copytree(made.adapter, both, dirs_exist_ok=True)
    assert tokens(both, adapter=both) == expected


DEVICES = {
    "streamed": {"schedule": "cgopipe", "policy": PAGED_POLICY},
    "resident": {"schedule": "resident"},
    "two ranks": {"tensor_parallel_size": 2, "schedule": "cgopipe", "policy": PAGED_POLICY},
}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, id=name, marks=[] if name == "streamed" else pytest.mark.slow)
        for name, fields in DEVICES.items()
    ],
)
def test_pages_and_ranks_hold_the_merged_weights(
    made: Directories, expected: list[tuple[int, ...]], fields: dict[str, Any]
) -> None:
    config = dataclasses.replace(SMALL, device="emulated", **fields)
    assert tokens(made.base, config, adapter=made.adapter) == expected


def test_a_journal_belongs_to_an_adapter(made: Directories, tmp_path: Path) -> None:
    def generate(model: Path, adapter: Path | None) -> list[str]:
        config = dataclasses.replace(SMALL, adapter=adapter)
        generator = MoEGenerator(
            str(model), sampling_params=PARAMS, engine_config=config, journal_dir=tmp_path / "j"
        )
        try:
            return list(generator({"prompt": PROMPTS})["generated_text"])
        finally:
            generator.close()

    texts = generate(made.base, made.adapter)
    assert generate(made.adapter, None) == texts  # the same, given in another way
    for adapter in (None, changed(made.adapter, tmp_path / "other")):
        with pytest.raises(ConfigError, match="adapter was"):
            generate(made.base, adapter)


def changed(adapter: Path, directory: Path) -> Path:
    shutil.copytree(adapter, directory)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 8}))
    return directory


def test_weights_are_shared_between_engines_with_the_same_adapter_alone(
    made: Directories, tmp_path: Path
) -> None:
    other = changed(made.adapter, tmp_path / "other")
    keys = {files_key(made.base, adapter) for adapter in (None, made.adapter, other)}
    assert len(keys) == 3
    identities = [ModelIdentity.of(made.base, adapter=each) for each in (made.adapter, other)]
    assert len({each.adapter for each in identities}) == 2
    (other / "adapter_model.safetensors").write_bytes(b"")
    identities[0].check_unchanged()


def test_memory_is_planned_without_a_sum(
    made: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(SMALL, adapter=made.adapter)
    spec = read_model(made.base, config)
    weights = open_weights(spec, made.base, config)
    monkeypatch.setattr(AdaptedWeights, "_merged", None)  # which is called for each sum
    for each in (weights, WatchedWeights(weights, lambda: None)):
        assert in_place_arena_bytes(spec, each, torch.float32) >= 0


def test_a_plan_counts_matrices_that_an_adapter_changes_as_they_are_held(tmp_path: Path) -> None:
    directory = checkpoints("fp8 blocks, odd sizes").quantised
    plain = checkpoints("fp8 blocks, odd sizes").plain
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    make_adapter(model, tmp_path, r=4, target_modules=[], target_parameters=EXPERTS)
    node = dataclasses.replace(hardware_preset("l4"), host_memory_bytes=8 * GIB).without_gpu()
    config = EngineConfig(device="cpu", dtype="float32")
    base = plan_actor(directory, config, node)
    adapted = plan_actor(directory, dataclasses.replace(config, adapter=tmp_path), node)
    assert base is not None
    assert adapted is not None
    weights = [each.plan.footprint.bytes_of("weights") for each in (base, adapted)]
    assert weights[1] > 1.5 * weights[0]
    spec, alone = (_model(str(directory), each, None, "auto") for each in (str(tmp_path), None))
    assert spec.weight_bytes(2) > 1.5 * alone.weight_bytes(2)
    tight = dataclasses.replace(node, host_memory_bytes=64 * MIB)
    with pytest.raises(InfeasiblePlanError, match="The adapter changes matrices in fp8_block"):
        plan_actor(directory, dataclasses.replace(config, adapter=tmp_path), tight)


def test_commands_and_drivers_hand_the_base_and_the_adapter_on(made: Directories) -> None:
    for arguments in (["--model", made.base, "--adapter", made.adapter], ["--model", made.adapter]):
        _, config = check_batch_options([str(each) for each in arguments])
        assert config.adapter == str(made.adapter)
    kwargs = map_batches_kwargs(made.adapter, engine_config={"device": "cpu"})
    assert kwargs["fn_constructor_args"] == (str(made.base),)
    assert kwargs["fn_constructor_kwargs"]["engine_config"].adapter == str(made.adapter)


def test_a_written_cluster_runs_with_the_adapter(made: Directories, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    arguments = ["--model", made.base, "--adapter", made.adapter, "--hardware", "g6e.xlarge"]
    arguments += ["--num-rows", 10_000, "--gen-len", 8, "--write", file]
    assert run(["plan", *map(str, arguments)]) == 0
    text = " ".join(file.read_text().replace("\\\n#", "").split())
    name = made.adapter.name
    assert f"--adapter /data/adapters/{name} --input" in text
    assert f"to be copied to /data/adapters/{name}" in text.replace("# ", "")


@pytest.mark.slow
def test_the_command_answers_with_an_adapter(made: Directories, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'prompt': each})}\n" for each in PROMPTS))
    options = {"--model": made.base, "--adapter": made.adapter, "--input": rows,
               "--output": tmp_path / "out", "--max-tokens": 12, "--temperature": 0,
               "--dtype": "float32"}  # fmt: skip
    arguments = [str(each) for pair in options.items() for each in pair]
    command = [sys.executable, "-m", "raymoe", "generate", *arguments, "--ignore-eos", "--dry-run"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    with Engine.from_pretrained(made.merged, SMALL) as engine:
        for answer in engine.generate(PROMPTS, PARAMS):
            assert harmless(answer.text) in done.stdout


# A process of its own: the peak is one of the process. Matrices are of 8 MiB, the model of 300.
LOAD = """
import sys
from raymoe.cli.generate import check_batch_options
from raymoe.config import EngineConfig
from raymoe.device.host import peak_rss_bytes
from raymoe.engine.engine import Engine
adapter = sys.argv[2] or None
config = EngineConfig(device="cpu", dtype=sys.argv[3], num_threads=1, adapter=adapter,
                      host_memory_bytes=2 << 30, max_model_len=64)
with Engine.from_pretrained(sys.argv[1], config) as engine:
    engine.generate(["one"], {"max_tokens": 2})
    print(peak_rss_bytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_peaks_at_most_a_matrix_above_that_of_the_base(tmp_path: Path, dtype: str) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3}
    base = make_checkpoint(tmp_path / "base", **sizes)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    fields = {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}
    make_adapter(model, tmp_path / "adapter", r=2, **fields)
    del model

    def peak(adapter: str) -> int:
        command = [sys.executable, "-c", LOAD, str(base), adapter, dtype]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(done.stdout.splitlines()[-1])

    peaks = peak(""), peak(str(tmp_path / "adapter"))
    matrix_bytes = 1024 * 2048 * 4
    adapter_bytes = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    assert peaks[1] <= peaks[0] + matrix_bytes + adapter_bytes + 4 * MIB, peaks
