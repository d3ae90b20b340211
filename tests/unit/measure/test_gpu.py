"""The data of a GPU's measurements, made on the host: shapes, directions, bytes."""

import pytest
import torch
from torch import Tensor

from raymoe.measure import gpu
from raymoe.measure.jobs import STATE

CPU = torch.device("cpu")
SIZES = {
    "HIDDEN_SIZE": 64,
    "PROJECTED_SIZE": 96,
    "EXPERT_SIZE": 32,
    "ROWS": (1, 5),
    "CONTEXTS": (40, 70),
    "PROMPTS": (33,),
    "KV_BYTES": 3 * 40 * 4096,
    "PROMPT_TOKENS": 60,
    "SMALL_EXPERT": 32,
    "NUM_STATES": 3,
    "MIN_WEIGHT_BYTES": 3 * 2 * 64 * 96,
    "READ_BYTES": 1024,
    "COPY_BYTES": 256,
}


@pytest.fixture(autouse=True)
def _small_and_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SIZES.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)


def test_jobs_multiply_every_number_of_rows_by_every_copy_of_the_weights() -> None:
    jobs = gpu.make_jobs(CPU)
    assert jobs.product_parameters == 64 * 96
    assert jobs.expert_parameters == 8 * 3 * 64 * 32
    for rows, products, experts in zip((1, 5), jobs.products, jobs.experts, strict=True):
        assert len(products) == 3
        assert {call().shape for call in products} == {(rows, 96)}
        assert len(experts) == 1
        assert {call().shape for call in experts} == {(4 * rows, 64)}
        _, ids, _ = experts[0].args  # type: ignore[attr-defined]
        assert ids.flatten().bincount().tolist() == [rows] * 8
    for bits, of_rows in jobs.stored_experts.items():
        assert bits in {4, 8}
        assert {call().shape for calls in of_rows for call in calls} == {(4, 64), (20, 64)}
    assert jobs.small[0]().shape == (8, 64)
    copied = jobs.reads[0]()
    assert isinstance(copied, Tensor)
    assert copied.nbytes == jobs.read_bytes == 1024


def test_attention_of_each_length_reads_the_same_and_prompts_are_whole() -> None:
    jobs = gpu.make_jobs(CPU)
    assert list(jobs.decodes) == [40, 70]
    for context, job in jobs.decodes.items():
        batch = -(-3 * 40 // context)
        assert job.bytes_per_call == batch * context * 4096
        assert job.flop_per_call == 4 * batch * context * 32 * 128
        assert [call().shape for call in job.calls] == [(batch, 32 * 128)]
    ((prompt, job),) = jobs.prefills.items()
    assert prompt == 33
    assert job.flop_per_call == 4 * 2 * (33 * 34 / 2) * 32 * 128
    assert [call().shape for call in job.calls] == [(2 * 33, 32 * 128)]


def test_a_step_updates_every_state_once() -> None:
    job = gpu.make_jobs(CPU).states
    (call,) = job.calls
    *_, states_NHKV, _ = call.args  # type: ignore[attr-defined]
    assert states_NHKV.shape == (3, 32, 128, 128)
    assert job.bytes_per_call == 2 * 3 * 4 * 32 * 128 * 128
    assert call().shape == (3, 32, 128)
    assert (states_NHKV != STATE).flatten(1).any(1).all()


def test_copies_go_where_their_name_says() -> None:
    copies = gpu.make_copies(CPU)
    ends = {
        name: (call.func.__self__, call.args[0])  # type: ignore[attr-defined]
        for name, call in (
            ("htod", copies.htod),
            ("dtoh", copies.dtoh),
            ("pageable_htod", copies.pageable_htod),
            ("pageable_dtoh", copies.pageable_dtoh),
        )
    }

    def memory(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    assert {target.nbytes for target, _ in ends.values()} == {copies.num_bytes}
    device = memory(ends["htod"][0])
    assert memory(ends["pageable_htod"][0]) == memory(ends["dtoh"][1]) == device
    assert memory(ends["pageable_dtoh"][1]) == device
    pinned, pageable = memory(ends["htod"][1]), memory(ends["pageable_htod"][1])
    assert memory(ends["dtoh"][0]) == pinned
    assert memory(ends["pageable_dtoh"][0]) == pageable
    assert len({device, pinned, pageable}) == 3
    # The two directions have different ends, so that they can be under way at once.
    assert ends["htod"][0].data_ptr() != ends["dtoh"][1].data_ptr()
    assert ends["htod"][1].data_ptr() != ends["dtoh"][0].data_ptr()
