"""Coded experts on this GPU, by Triton and by humming-kernels: `python -m tools.bench_experts`.

A layer of random weights in each format, and tokens that choose experts in turn. A line has the
seconds of a call of each, in turns, the rate of the products, and how far their results are from
the same experts by torch, one after another. Compiling is not counted.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from raymoe.codecs import on_device
from raymoe.device.find_gpu import half_dtype
from raymoe.doctor.kernels import PACKED_FORMATS, make, make_packed
from raymoe.kernels.cpu_experts import Experts, PlainExperts
from raymoe.kernels.gpu_experts_layout import ExpertMatrices, balanced_routing
from raymoe.kernels.humming.products import why_not_here
from raymoe.measure.jobs import random_matrix
from raymoe.specs.weight_format import WeightFormat

TOP_K = 4
ROWS = (4, 16, 64, 256, 1024)  # of an expert
MOST_ROWS_OF_PLAIN = 64  # more take long and show nothing else
REPETITIONS = 9


def layer_of(
    stored: WeightFormat, sizes: tuple[int, int, int], device: torch.device
) -> ExpertMatrices:
    """All experts are the same two matrices, of their own memory each: drawing them takes long."""
    num_experts, hidden, wide = sizes
    outer, inner = (random_matrix(stored, shape) for shape in ((wide, hidden), (hidden, wide)))
    gates, ups, downs = (
        [on_device(one, device) for _ in range(num_experts)] for one in (outer, outer, inner)
    )
    return ExpertMatrices(gates, ups, downs, are_reordered=False)


def seconds(run: Callable[[], Tensor]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def error(got_TH: Tensor, want_TH: Tensor) -> float:
    return float((got_TH.double() - want_TH.double()).norm() / want_TH.double().norm())


def compare(
    backends: dict[str, Experts], plain: Experts, sizes: tuple[int, int, int], rows: int
) -> str:
    num_experts, hidden, wide = sizes
    device, dtype = torch.device("cuda"), half_dtype()
    num_tokens = max(rows * num_experts // TOP_K, 1)
    ids_TK, weights_TK = balanced_routing(num_tokens, num_experts, TOP_K, device)
    hidden_TH = torch.randn(num_tokens, hidden, dtype=dtype, device=device)
    arguments = (hidden_TH, ids_TK, weights_TK)
    found = {name: run(*arguments) for name, run in backends.items()}
    taken: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(REPETITIONS):
        for name, run in backends.items():
            taken[name].append(seconds(partial(run, *arguments)))
    flop = 6 * num_tokens * TOP_K * hidden * wide
    middle = {name: statistics.median(each) for name, each in taken.items()}
    parts = [
        f"{name} {1e3 * each_s:8.3f} ms {flop / each_s / 1e12:6.1f} TFLOP/s"
        for name, each_s in middle.items()
    ]
    if rows <= MOST_ROWS_OF_PLAIN:
        want_TH = plain(*arguments)
        parts += [f"error of {name} {error(got, want_TH):.1e}" for name, got in found.items()]
    return f"{rows:5} rows an expert  " + "  ".join(parts)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in (("experts", 16), ("hidden", 4096), ("wide", 2048)):
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    sizes = (options.experts, options.hidden, options.wide)
    device, dtype = torch.device("cuda"), half_dtype()
    reason = why_not_here(torch.cuda.get_device_capability(device), dtype)
    if reason is not None:
        parser.error(reason)
    print(f"{torch.cuda.get_device_name(device)}, {dtype}, experts, hidden, wide: {sizes}")
    for stored in PACKED_FORMATS:
        matrices = layer_of(stored, sizes, device)
        backends = {"Triton": make(matrices, dtype), "humming": make_packed(matrices, dtype)}
        plain = PlainExperts(*matrices[:3], activation="silu")
        print(stored)
        for rows in ROWS:
            print(compare(backends, plain, sizes, rows), flush=True)


if __name__ == "__main__":
    main()
