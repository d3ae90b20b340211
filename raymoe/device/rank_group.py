"""RankGroup: what the ranks of one node add up, through torch.distributed.

The group is an object of its own and no default group of torch's, so that it leaves alone what else
the process does with torch.distributed, and any number of engines live side by side.

Why no two ranks can wait for each other in different sums: sums are part of `pre`, `post` and
`experts`, which all run on the lane of the GPU. A lane runs its tasks in issue order, and all ranks
issue the same schedule for the same tokens with the same sizes. So the n-th sum of a step is the
same one on every rank, however their other lanes interleave. Where pages lie, and whether they are
staged, may differ between ranks; it changes when a sum begins and not which one is next.
"""

# ruff: noqa: SLF001 - torch has these options under no other names

from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor
from torch import distributed as dist

from raymoe.errors import ExecutionError

LOOPBACK = "127.0.0.1"  # ranks are on one node; nobody else can connect
JOIN_LIMIT_S = 120.0


class PeerError(ExecutionError):
    """Another rank is gone, or did not come in time."""


class _Sum(Protocol):
    def wait(self) -> bool: ...


class _Group(Protocol):
    def allreduce(self, tensors: list[Tensor]) -> _Sum: ...

    def abort(self) -> None: ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...


class RankGroup:
    """The ranks of a node, each a process."""

    def __init__(
        self, meeting_place: Path, rank: int, count: int, *, device: torch.device, timeout_s: float
    ) -> None:
        """Meet the other ranks; returns when all are there.

        Args:
            meeting_place: A file that does not exist yet, in a directory that all ranks see.
            device: Where the tensors are; NCCL on a GPU, Gloo on the host.
            timeout_s: Longest wait for the others in one sum.

        Raises:
            PeerError: Not all came in time.
            ExecutionError: The first sum is wrong.
        """
        self.rank, self.count = rank, count
        self._is_on_gpu = device.type == "cuda"
        store = dist.FileStore(str(meeting_place), count)  # type: ignore[attr-defined]
        try:
            self._group = _open(store, rank, count, device)
        except RuntimeError as error:
            raise PeerError(f"rank {rank} did not find the other ranks: {error}") from error
        met = self.all_reduce(torch.ones(1, device=device)).item()
        if met != count:
            raise ExecutionError(f"rank {rank} of {count} added up {met} ranks")
        self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place; the same bits on each.

        Both libraries add up each element in one place, or in one order, and hand it on. On a GPU
        the current stream waits, and not the caller.

        Raises:
            PeerError: Another rank is gone, or did not come in time.
        """
        if tensor.numel():  # micro-batches may be empty, on all ranks the same
            try:
                self._group.allreduce([tensor]).wait()
            except RuntimeError as error:
                raise PeerError(f"rank {self.rank} waited in vain for another: {error}") from error
        return tensor

    def abort(self) -> None:
        """Let a sum fail that waits for a rank that is gone; from any thread.

        Gloo sees by itself when a process ends.
        """
        if self._is_on_gpu:
            self._group.abort()


def _open(store: object, rank: int, count: int, device: torch.device) -> _Group:
    limit = timedelta(seconds=JOIN_LIMIT_S)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        return cast("_Group", dist.ProcessGroupNCCL(store, rank, count, nccl))  # type: ignore[arg-type]
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    gloo._timeout = limit
    return cast("_Group", dist.ProcessGroupGloo(store, rank, count, gloo))  # type: ignore[arg-type]
