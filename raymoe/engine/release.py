"""Gives back what a closed engine or a failed load held, also where a caller keeps its error."""

import traceback

import torch

from raymoe.device.host import trim_heap


def clear_frames(error: BaseException | None, outer: BaseException | None = None) -> None:
    """Clear the local variables of the frames that an error, its causes and contexts came through.

    A notebook keeps its last error, and with it every tensor that a frame of it names. Frames that
    still run keep theirs.

    Args:
        outer: What was being handled before; its frames are those of others.
    """
    seen = {id(outer)}
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]


def return_memory() -> None:
    """Return freed memory to the system and the GPU; allocators keep it for later requests."""
    if torch.cuda.is_initialized():
        # Those of cuBLAS belong to streams of engines that are closed, and hold all of a segment.
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
        torch.cuda.empty_cache()
    trim_heap()
