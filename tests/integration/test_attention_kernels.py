"""Our GPU kernels for attention under the engine, interpreted: staged blocks, resident caches."""

import pytest
import torch

from raymoe.kernels import gpu_attention_batch as choice
from raymoe.kernels.gpu_attention_batch import AttentionCompute
from raymoe.kernels.latent_heads import LatentHeads
from raymoe.plan.policy import DevicePolicy
from tests.integration import test_schedules as schedules
from tests.parity.cases import get_case
from tests.triton_mode import HAS_GPU

pytest.importorskip("triton")

FLOAT32 = AttentionCompute(dtype=torch.float32, dot=torch.float32)
PARAMS = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
NUM_PROMPTS = 3
DEVICES = {
    "staged, half of it": ("module_batching", DevicePolicy(
        num_micro_batches=2, page_bytes=9_000, cpu_attention_fraction=0.5
    )),
    "staged, all of it": ("flexgen_s4", DevicePolicy(
        num_micro_batches=2, page_bytes=9_000, cpu_attention_fraction=0.0
    )),
    "resident": ("resident", DevicePolicy(resident_bytes=1 << 30)),
}  # fmt: skip


def generate(name: str, sizes: dict[str, int], **config: object) -> list[tuple[int, ...]]:
    with schedules.make_engine(name, sizes, **config) as engine:
        prompts = [prompt[:18] for prompt in get_case(name).reference.prompts[:NUM_PROMPTS]]
        rows = engine.generate(prompts, PARAMS)
        assert [row.error for row in rows] == [""] * len(rows)
        return [row.token_ids for row in rows]


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: tests/integration/test_cuda.py uses it")
@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("mixtral", "staged, all of it"),
        ("gpt_oss", "staged, half of it"),
        ("deepseek_v3", "staged, half of it"),
        ("mixtral", "resident"),
        ("deepseek_v3", "resident"),
    ],
)
def test_our_kernels_give_the_tokens_of_the_cpu(
    name: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raymoe.kernels.gpu_attention import Attending  # noqa: PLC0415 - needs Triton

    name = schedules.plain_configuration(name)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_prefill_chunk_tokens": 12}
    monkeypatch.setattr(LatentHeads, "min_plain_tokens", 8)  # so that both forms are used
    expected = generate(name, sizes)
    shapes = set()
    run = Attending.run

    def counted(self: Attending, tiles) -> None:  # type: ignore[no-untyped-def]
        if len(tiles.tiles_NF):
            shapes.add(tiles.tokens)
        run(self, tiles)

    monkeypatch.setattr(Attending, "run", counted)
    monkeypatch.setattr(choice, "attention_compute", lambda *_: FLOAT32)
    schedule, policy = DEVICES[placement]
    config = {"device": "emulated", "schedule": schedule, "device_policy": policy}
    assert generate(name, sizes, **config) == expected
    assert len(shapes) == 2, "tokens alone and together take our kernels"
