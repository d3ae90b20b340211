"""Copy large pieces between host and device so that small copies need not wait for all of them.

Source: MoE-Lens, section 5 (contiguous data mover: packets of about 100 MB, one outstanding at a
time, so that small copies of the pipeline slip in between).
"""

from typing import Generic

import torch
from torch import Tensor

from raymoe.device.cuda_api import CudaApi, EventT, StreamT
from raymoe.device.pinned import CHUNK_BYTES, cut
from raymoe.errors import ConfigError
from raymoe.units import MIB

# 0.7 to 1.4 ms at 12 to 25 GB/s: as long as a small copy waits at most, and long enough that the
# 20 us until the host has sent the next packet cost 1 to 3 % of the link.
PACKET_BYTES = 16 * MIB


class PacketCopier(Generic[StreamT, EventT]):
    """Copies on one stream with at most one packet in flight.

    A copy engine serves its streams in turn, but never interrupts a copy: with one packet in
    flight, a copy that another stream enqueues goes next. Used by one thread, that of the lane.
    """

    def __init__(
        self,
        api: CudaApi[StreamT, EventT],
        stream: StreamT,
        *,
        packet_bytes: int = PACKET_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Make a copier.

        Args:
            api: Of the device.
            stream: On which it copies.
            packet_bytes: Largest single copy.
            chunk_bytes: No copy crosses an address of the source that is a multiple of this; as
                the source was pinned.

        Raises:
            ConfigError: A size is not positive.
        """
        if packet_bytes <= 0 or chunk_bytes <= 0:
            raise ConfigError(
                f"packets of {packet_bytes}, chunks of {chunk_bytes} bytes: too small"
            )
        self._api = api
        self._stream = stream
        self._packet_bytes = packet_bytes
        self._chunk_bytes = chunk_bytes
        self._in_flight: EventT | None = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` to `target`, equal in bytes and each in one piece.

        Returns when the last packet is in flight; what follows on the stream comes after it.

        Raises:
            ConfigError: The tensors differ in size or are not in one piece.
        """
        if not (target.is_contiguous() and source.is_contiguous()):
            raise ConfigError("source and target must be in one piece")
        if target.nbytes != source.nbytes:
            raise ConfigError(f"cannot copy {source.nbytes} bytes to {target.nbytes} bytes")
        sink, data = _as_bytes(target), _as_bytes(source)
        origin = data.data_ptr()
        for chunk_begin, chunk_end in cut(origin, origin + data.numel(), self._chunk_bytes):
            for begin in range(chunk_begin - origin, chunk_end - origin, self._packet_bytes):
                end = min(begin + self._packet_bytes, chunk_end - origin)
                self._send(sink[begin:end], data[begin:end])

    def _send(self, target: Tensor, source: Tensor) -> None:
        if self._in_flight is not None:
            self._api.wait_event(self._in_flight)
        with self._api.use(self._stream):
            target.copy_(source, non_blocking=True)
        self._in_flight = self._api.new_event()
        self._api.record(self._in_flight, self._stream)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
