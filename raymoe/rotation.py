"""Rotation by Hadamard matrices, before numbers are rounded to int8.

A few large numbers of a row become many of middling size, which share a scale without loss; the
products of two rows that are rotated are those of the rows, times the length of a run. Source:
QuaRot (arXiv 2404.00456).
"""

import torch
from torch import Tensor

MAX_INPUT_RUN = 128


def input_run(inputs: int) -> int:
    """How many inputs are rotated together: the largest power of two that divides them, to 128."""
    return min(inputs & -inputs, MAX_INPUT_RUN)


def rotated(rows_XI: Tensor, run: int) -> Tensor:
    """Multiply runs of each row by a Hadamard matrix, in float32; twice multiplies by `run`."""
    out, step = rows_XI.float(), 1
    while step < run:
        left, right = out.reshape(-1, rows_XI.shape[-1] // (2 * step), 2, step).unbind(2)
        out, step = torch.stack([left + right, left - right], 2), 2 * step
    return out.reshape(rows_XI.shape)
