"""`raymoe bench`: engines and schedules on the same rows, beside the limit of the machine."""

import importlib
from pathlib import Path

from raymoe.cli import bench_options as option
from raymoe.cli.bench_cpu import CpuOptions, run_engines, run_kernels, run_passes
from raymoe.cli.bench_gpu import GpuOptions, run_gpu
from raymoe.device.host import read_host
from raymoe.errors import UnknownOptionError


def run(  # noqa: PLR0913 - the options of a command
    *,
    suite: option.Suite = "cpu",
    shape: option.Shapes = [],  # noqa: B006 - typer copies it
    workload: option.Workloads = [],  # noqa: B006
    contender: option.Contenders = [],  # noqa: B006
    repetitions: option.Repetitions = 3,
    num_threads: option.NumThreads = None,
    phases: option.Phases = False,
    kernels: option.Kernels = False,
    passes: option.Passes = False,
    out: option.Out = Path("raymoe-bench"),
    device: option.Device = "cuda",
    hardware: option.Hardware = None,
    device_memory: option.DeviceMemory = None,
    host_memory: option.HostMemory = None,
    layers: option.Layers = None,
    part_limit: option.PartLimit = 540.0,
    most_rows: option.MostRows = 8192,
    again: option.Again = False,
    actors: option.NumActors = None,
    rows: option.NumRows = None,
    speedup: option.Speedup = None,
) -> None:
    """Measure generated tokens per second on random weights, end to end; or kernels, or passes.

    Bound: operations over 0.94 of the measured bfloat16 peak and bytes over the measured read
    bandwidth, the longer for each phase. Rows generate every token (no early end), greedily.

    The suite gpu runs each part (a shape, a workload, a contender) in a process of its own, takes
    up where it was stopped, and leaves gpu.jsonl, report.md and pictures in --out. Its bound:
    weights over the link, weights and KV out of host memory, operations, for the whole job.
    """
    if suite not in option.SUITES:
        raise UnknownOptionError(suite, option.SUITES, "suite")
    cores = num_threads or read_host().num_cores
    if suite in option.NODE_SUITES:
        nodes = importlib.import_module("raymoe.cli.bench_scale")  # Ray is slow to import
        options = option.ScaleOptions(actors=actors, rows=rows, speedup=speedup, out=out)
        nodes.run_suite(suite, options)
    elif suite == "gpu":
        run_gpu(
            GpuOptions(
                shapes=shape, workloads=workload, contenders=contender, device=device,
                hardware=hardware, device_memory=device_memory, host_memory=host_memory,
                num_threads=num_threads, num_layers=layers, part_limit_s=part_limit,
                most_rows=most_rows, is_again=again, out=out,
            )
        )  # fmt: skip
    elif kernels:
        run_kernels(cores, repetitions)
    else:
        chosen = CpuOptions(
            shapes=shape or ["mixtral"], workloads=workload or ["W1"],
            contenders=contender or ["raymoe", "transformers"],
            repetitions=repetitions, num_threads=cores, out=out,
        )  # fmt: skip
        run_passes(chosen) if passes else run_engines(chosen, has_phases=phases)
