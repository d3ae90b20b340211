"""The inputs of a step travel in one copy, on a stand-in for a device that works later."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from raymoe.device.cuda import CudaDevice
from raymoe.device.emulated import HostDevice
from raymoe.kernels.tensors import map_tensors
from raymoe.runtime.inputs import ALIGNMENT, FIRST_BYTES, StepInputs
from raymoe.units import GIB
from tests.unit.device.deferred_cuda import DeferredCuda


@dataclass(frozen=True, slots=True)
class Indices:
    rows: Tensor
    names: tuple[Tensor, ...]
    missing: Tensor | None
    count: int


def indices(first: int, num_rows: int = 3) -> tuple[Tensor, list[Indices]]:
    rows = torch.arange(first, first + num_rows)
    names = (rows.int()[:1], rows[:0].view(0, 4), rows.view(-1, 1).expand(-1, 2))
    return rows.int(), [Indices(rows, names, None, 7)]


def tensors_of(value: object) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found


class CountingCuda(DeferredCuda):
    """Counts what is put into its streams."""

    num_launches = 0

    def launch(self, work: Callable[[], object]) -> None:
        self.num_launches += 1
        super().launch(work)


@pytest.fixture
def cuda() -> CountingCuda:
    return CountingCuda()


@pytest.fixture
def device(cuda: CountingCuda) -> Iterator[CudaDevice]:
    device = CudaDevice(cuda, GIB)
    yield device
    device.close()


@torch.inference_mode()
def test_all_tensors_are_views_of_one_copy(cuda: CountingCuda, device: CudaDevice) -> None:
    want = indices(5)
    sent = StepInputs(device).send(want)
    assert cuda.num_launches == 1
    assert sent[1][0].count == 7
    assert sent[1][0].missing is None
    places = tensors_of(sent)
    assert {place.untyped_storage().data_ptr() for place in places} == {
        places[0].untyped_storage().data_ptr()
    }
    assert [place.data_ptr() % ALIGNMENT for place in places] == [0] * 5
    assert [place.is_contiguous() for place in places] == [True] * 5
    device.compute(lambda: None)
    for place, tensor in zip(places, tensors_of(want), strict=True):
        assert place.dtype == tensor.dtype
        assert torch.equal(place, tensor)


@torch.inference_mode()
def test_a_step_that_reads_later_finds_its_own_inputs(device: CudaDevice) -> None:
    inputs, seen = StepInputs(device), []
    for first in (5, 50, 500):
        rows, _ = inputs.send(indices(first))
        with device.computing():  # as a step whose end nobody waited for
            seen.append(rows + 1)
    device.compute(lambda: None)
    assert [each.tolist() for each in seen] == [[n + 1, n + 2, n + 3] for n in (5, 50, 500)]


@torch.inference_mode()
def test_buffers_grow_with_the_inputs() -> None:
    inputs = StepInputs(HostDevice())
    for num_rows in (3, FIRST_BYTES, 3):
        rows, (sent,) = inputs.send(indices(1, num_rows))
        assert torch.equal(rows, torch.arange(1, num_rows + 1).int())
        assert torch.equal(sent.rows, torch.arange(1, num_rows + 1))
