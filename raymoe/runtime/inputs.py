"""What a step reads on the device goes there in one copy."""

from typing import TypeVar

import torch
from torch import Tensor

from raymoe.device.device import Device
from raymoe.device.threads import torch_on_all_cores
from raymoe.kernels.tensors import map_tensors
from raymoe.model.decoder import Decoder
from raymoe.runtime.batch import InputBatch

T = TypeVar("T")


def ngrams_of(decoder: Decoder, batch: InputBatch) -> Tensor | None:
    """Embeddings of n-grams of a step, [N, T, E] of N layers; None if no layer reads them."""
    if not decoder.spec.num_past_tokens:
        return None
    past = batch.sequences.past_tokens
    with torch_on_all_cores():
        return decoder.ngrams_of_tokens(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.sequences.query_start),
            None if past is None else torch.from_numpy(past),
        )


ALIGNMENT = 16  # bytes; Triton compiles other kernels for arguments that are aligned less
FIRST_BYTES = 1 << 20


class StepInputs:
    """A buffer on the device with the inputs of the current step, and its pinned copy.

    A copy of its own for each tensor would wait each time for pages that are on the link.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pinned = self._buffer = torch.empty(0, dtype=torch.uint8)

    def send(self, inputs: T) -> T:
        """Return `inputs`, which are on the host, with their tensors on the device.

        They are there for what runs later in the stream of computation, and until the next call.
        No step may run: what the one before reads is overwritten.
        """
        tensors: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        map_tensors(collect, inputs)
        begins, num_bytes = [], 0
        for tensor in tensors:
            begins.append(num_bytes)
            num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        with self._device.computing():
            self._device.synchronize()  # for a step that was interrupted before it read them
        if num_bytes > len(self._buffer):
            self._grow(num_bytes)
        for tensor, begin in zip(tensors, begins, strict=True):
            _view(self._pinned, begin, tensor).copy_(tensor)
        with self._device.computing():
            self._buffer[:num_bytes].copy_(self._pinned[:num_bytes], non_blocking=True)
        places = iter(begins)
        return map_tensors(lambda tensor: _view(self._buffer, next(places), tensor), inputs)

    def _grow(self, num_bytes: int) -> None:
        size = max(FIRST_BYTES, 1 << (num_bytes - 1).bit_length())
        self._pinned = self._device.allocate_pinned(size)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)
        # The memory may be some that work of this thread's stream still uses.
        self._device.synchronize()


def _view(memory: Tensor, begin: int, like: Tensor) -> Tensor:
    return memory[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
