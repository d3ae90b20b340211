"""Our GPU kernels for experts under the engine, interpreted: pages, slots, tables of addresses."""

from pathlib import Path

import pytest
import torch

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.model import device_experts as choice
from raymoe.plan.policy import DevicePolicy, Policy
from tests.integration.test_schedules import plain_configuration
from tests.parity.cases import get_case
from tests.quantised_checkpoints import checkpoints
from tests.triton_mode import HAS_GPU

pytest.importorskip("triton")

SIZES = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_prefill_chunk_tokens": 64,
    "num_kv_blocks": 40,
}
DEVICE = DevicePolicy(num_micro_batches=2, page_bytes=9_000, resident_bytes=30_000)
PROMPTS = [[3, 5, 8], [13], [21, 34, 55, 89]]


def generate(directory: Path, device: str) -> list[tuple[int, ...]]:
    policy = Policy(**SIZES, device=DEVICE if device == "emulated" else None)
    schedule = "cgopipe" if device == "emulated" else "auto"
    config = EngineConfig(
        dtype="float32", device=device, schedule=schedule, policy=policy, linger_s=0.0
    )
    with Engine.from_pretrained(directory, config) as engine:
        rows = engine.generate(PROMPTS, {"temperature": 0, "max_tokens": 4, "ignore_eos": True})
    assert [row.error for row in rows] == [""] * len(rows)
    return [row.token_ids for row in rows]


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: tests/integration/test_cuda.py uses it")
@pytest.mark.parametrize("name", ["mixtral", "mxfp4", "gptq, act-order, zero points"])
def test_streamed_and_resident_experts_give_the_tokens_of_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raymoe.kernels.gpu_experts import GroupedExperts  # noqa: PLC0415 - needs Triton

    is_plain = name == "mixtral"
    directory = (
        get_case(plain_configuration(name)).directory if is_plain else checkpoints(name).quantised
    )
    expected = generate(directory, "cpu")
    calls = []
    launch = GroupedExperts.__call__

    def counted(self: GroupedExperts, *inputs: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        return launch(self, *inputs)

    monkeypatch.setattr(GroupedExperts, "__call__", counted)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    monkeypatch.setattr(
        choice, "grouped_experts_are_used", lambda matrices, *_: matrices.layouts() is not None
    )
    assert generate(directory, "emulated") == expected
    assert len(set(calls)) >= 2, "layers take our kernels"
