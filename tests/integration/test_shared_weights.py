"""Two engines of one machine, one copy of the weights: in tokens, in memory, and when one dies."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

import raymoe
from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError, PerformanceWarning
from raymoe.memory import shared_file
from raymoe.memory.weight_pages import WeightPages
from raymoe.units import GIB, MIB
from tests.tiny import PAGED_POLICY, make_checkpoint

CONFIG = EngineConfig(
    device="emulated",
    dtype="float32",
    schedule="cgopipe",
    policy=PAGED_POLICY,
    host_memory_bytes=2 * GIB,
    num_threads=1,
    linger_s=0.0,
)
PROMPTS, PARAMS = ["one", "another", "a third"], {"max_tokens": 8, "temperature": 1.0}
SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
from raymoe.engine.engine import Engine
from raymoe.memory import shared_file
from tests.integration.test_shared_weights import CONFIG, PARAMS, PROMPTS
shared_file.DIRECTORY = Path(sys.argv[2])
config = dataclasses.replace(CONFIG, shared_weights=json.loads(sys.argv[3]))
if json.loads(sys.argv[4]):
    config = dataclasses.replace(config, policy=None, schedule="auto")
with Engine.from_pretrained(sys.argv[1], config) as engine:
    answers = [list(one.token_ids) for one in engine.generate(PROMPTS, PARAMS)]
    print(json.dumps([answers, engine.plan.schedule, engine.policy.max_num_seqs]), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """100 MiB of experts."""
    return make_checkpoint(
        tmp_path_factory.mktemp("model"),
        hidden_size=256,
        intermediate_size=512,
        num_local_experts=8,
        num_hidden_layers=8,
        head_dim=64,
    )


class Process:
    """An engine in a process of its own, which stays until it is told to end."""

    def __init__(self, model, directory, *, shared=True, is_free=False):
        places = [Path(raymoe.__file__).parents[1], Path(__file__).parents[2]]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, model, directory, *map(json.dumps, (shared, is_free))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()}"
        self.tokens, self.schedule, self.max_num_seqs = json.loads(line)

    def maps(self, directory):
        """Proportional and private bytes of the shared file, and all private bytes."""
        found = [
            one
            for one in psutil.Process(self.process.pid).memory_maps(grouped=False)
            if one.path.startswith(str(directory))
        ]
        (shared,) = found or [None]
        private = psutil.Process(self.process.pid).memory_full_info().uss
        return shared, private

    def end(self, *, kill=False):
        if kill:
            self.process.kill()
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.mark.slow
def test_two_processes_have_one_copy_and_the_same_tokens(model, tmp_path):
    alone = Process(model, tmp_path, shared=False)
    _, private_alone = alone.maps(tmp_path)
    alone.end()
    assert list(tmp_path.iterdir()) == []
    first, second = Process(model, tmp_path), Process(model, tmp_path)
    assert first.tokens == second.tokens == alone.tokens
    (path,) = tmp_path.iterdir()
    num_bytes = path.stat().st_size
    assert num_bytes > 90 * MIB
    maps, privates = zip(*(one.maps(tmp_path) for one in (first, second)), strict=True)
    pss = sum(one.pss for one in maps)
    print(  # noqa: T201 - what the test is run for
        f"\nshared file {num_bytes / MIB:.0f} MiB, sum of PSS {pss / MIB:.0f} MiB, private "
        f"{privates[0] / MIB:.0f} and {privates[1] / MIB:.0f} MiB, alone {private_alone / MIB:.0f}"
    )
    assert 0.9 * num_bytes < pss < 1.1 * num_bytes
    assert [one.perms[:2] for one in maps] == ["r-", "r-"]
    for private in privates:
        assert private < private_alone - 0.8 * num_bytes
    first.end(kill=True)
    third = Process(model, tmp_path, is_free=True)  # takes the sizes that the first one chose
    assert third.tokens == alone.tokens
    assert (third.schedule, third.max_num_seqs) == ("cgopipe", PAGED_POLICY.max_num_seqs)
    assert path.exists()
    second.end()
    third.end()
    assert not path.exists()


def test_an_engine_that_is_told_other_sizes_says_so_and_loads_its_own(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_file, "DIRECTORY", tmp_path)
    shared = dataclasses.replace(CONFIG, shared_weights=True)
    other = dataclasses.replace(shared, policy=dataclasses.replace(PAGED_POLICY, max_num_seqs=4))
    with Engine.from_pretrained(model, shared) as engine:
        expected = engine.generate(PROMPTS, PARAMS)
        with pytest.warns(PerformanceWarning, match="loads its own copy"):
            alone = Engine.from_pretrained(model, other)
        with alone:
            assert [one.token_ids for one in alone.generate(PROMPTS, PARAMS)] == [
                one.token_ids for one in expected
            ]
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_edited_model_does_not_get_the_weights_of_the_original(model, tmp_path, monkeypatch):
    """The edit keeps the file's size and is where samples of it would not see it."""
    monkeypatch.setattr(shared_file, "DIRECTORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    edited = shutil.copytree(model, tmp_path / "edited")
    tensors = load_file(edited / "model.safetensors")
    weight = tensors["model.layers.0.self_attn.o_proj.weight"]
    weight.copy_(weight.flip(0))
    save_file(tensors, edited / "model.safetensors", {"format": "pt"})
    shared = dataclasses.replace(CONFIG, shared_weights=True)
    with Engine.from_pretrained(edited, CONFIG) as engine:
        expected = [one.token_ids for one in engine.generate(PROMPTS, PARAMS)]
    with Engine.from_pretrained(model, shared) as original:
        with Engine.from_pretrained(edited, shared) as engine:
            assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == expected
        assert [one.token_ids for one in original.generate(PROMPTS, PARAMS)] != expected


def test_an_engine_that_cannot_load_leaves_no_file(model, tmp_path, monkeypatch):
    def fail(*_):
        raise ConfigError("no such weight")

    monkeypatch.setattr(shared_file, "DIRECTORY", tmp_path)
    monkeypatch.setattr(WeightPages, "_copy", fail)
    with pytest.raises(ConfigError, match="no such weight"):
        Engine.from_pretrained(model, dataclasses.replace(CONFIG, shared_weights=True))
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_is_shared_it_cannot_be_asked_for(model):
    with pytest.raises(ConfigError, match="on the device 'cpu' are not shared"):
        Engine.from_pretrained(model, EngineConfig(device="cpu", shared_weights=True))
