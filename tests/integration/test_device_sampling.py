"""Tokens that the device chooses where the logits are equal those that the host chooses."""

import pytest

from raymoe.engine import core, sampler
from raymoe.kernels import elementwise
from raymoe.plan.policy import DevicePolicy
from tests.integration import test_schedules as schedules

pytest.importorskip("triton")

# Greedy and drawn on the device; processed, with log probabilities or of a grammar on the host.
ROWS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1, "n": 2},
    {"temperature": 1, "top_k": 4},
    {"temperature": 1, "logprobs": 2},
    {"temperature": 0, "prompt_logprobs": 1},
]


@pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
def test_a_device_chooses_the_tokens_of_the_host(
    resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = schedules.plain_configuration("mixtral")
    prompts = [[5, 9, 2, 8 + i] for i in range(len(ROWS))]
    rows = [{"max_tokens": 3} | row for row in ROWS]
    policy = DevicePolicy(
        num_micro_batches=1 if resident else 2, resident_bytes=1 << 30 if resident else 0
    )
    config = {"device": "emulated", "device_policy": policy}
    config["schedule"] = "resident" if resident else "module_batching"
    found, sent = [], []
    choose = sampler.choose

    def counted(logits_CV, draws_R4):
        with monkeypatch.context() as patch:
            patch.setattr(elementwise, "triton_runs_on", lambda _device: True)
            sent.append(len(draws_R4))
            return choose(logits_CV, draws_R4)

    monkeypatch.setattr(sampler, "choose", counted)
    for chooses in (False, True):
        monkeypatch.setattr(core, "triton_runs_on", lambda _, chooses=chooses: chooses)
        with schedules.make_engine(name, {}, **config) as engine:
            found.append(engine.generate(prompts, rows))
        assert bool(sent) == chooses
    assert found[0] == found[1]
    assert all(not generation.error for generation in found[1])
