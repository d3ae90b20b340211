"""All-reduce among the ranks of one node, through torch.distributed.

The group is not torch's default group, so that other uses of torch.distributed in this process and
any number of engines are independent.

Ranks cannot deadlock by waiting in different all-reduces: all-reduces belong to `pre`, `post` and
`experts`, which all run on the GPU lane. A lane runs its tasks in issue order, and all ranks issue
the same schedule for the same tokens with the same sizes. So the n-th all-reduce of a step is the
same one on every rank, however other lanes interleave. Where pages lie, and whether they are
staged, may differ between ranks; this changes when an all-reduce begins, not which one is next.
"""

# ruff: noqa: SLF001 - torch has these options under no other names

from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor
from torch import distributed as dist

from raymoe.errors import ExecutionError

LOOPBACK = "127.0.0.1"  # ranks are on one node, and only it can connect
JOIN_LIMIT_S = 120.0


class PeerError(ExecutionError):
    """Another rank is gone, or timed out."""


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
        """Meet the other ranks; return when all are there.

        Args:
            meeting_place: A file that does not exist yet, in a directory that all ranks see.
            device: Device of the tensors; NCCL on a GPU, Gloo on the host.
            timeout_s: Longest wait for the others in one all-reduce.

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
        """Sum a tensor over all ranks, in place, with the same bits on each.

        Both libraries compute each element in one place or in one order. On a GPU the current
        stream waits, not the caller.

        Raises:
            PeerError: Another rank is gone, or timed out.
        """
        if tensor.numel():  # a micro-batch may be empty, then on all ranks
            try:
                self._group.allreduce([tensor]).wait()
            except RuntimeError as error:
                raise PeerError(f"rank {self.rank} waited in vain for another: {error}") from error
        return tensor

    def abort(self) -> None:
        """Fail an all-reduce that waits for a rank that is gone; callable from any thread.

        Gloo notices the end of a process itself.
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
