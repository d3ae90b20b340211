"""`raymoe profile`: what this machine reaches, measured and kept; with --tiles, GPU kernels."""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from raymoe.cli import model_by_name
from raymoe.config import Settings
from raymoe.device.cuda_api import TorchCuda
from raymoe.device.find_gpu import half_dtype
from raymoe.errors import ConfigError, ExecutionError
from raymoe.kernels.triton_support import OLDEST_CAPABILITY
from raymoe.measure.kept import Gpu, load_tiles, store_tiles
from raymoe.measure.plausible import find_problems
from raymoe.measure.profile import USUAL_SECONDS, obtain_profile
from raymoe.measure.tiles import WEIGHT_SHARE, BucketTiles, ExpertLayer, measure_layer, time_on
from raymoe.specs.files import to_json
from raymoe.specs.hardware import Curve, DeviceCurves, HardwareSpec, HostCurves
from raymoe.units import GB, format_bytes, format_seconds


def run_tiles(model: str | None, *, is_again: bool) -> None:
    """Measure what is not known of the model's experts, and keep it after every step.

    Raises:
        ConfigError: There is no GPU, no model, or no kernel for it.
    """
    if model is None:
        raise ConfigError("--tiles needs --model: the shape and the format of the experts")
    spec = model_by_name(model)
    _check_gpu()
    settings, gpu, api = Settings.from_environment(), Gpu.current(), TorchCuda()
    dtype = half_dtype()
    console, found = Console(stderr=True), []
    with api.thread_context():
        free_bytes, _ = torch.cuda.mem_get_info(api.device)
        for layer in ExpertLayer.each(spec, dtype, api.device, WEIGHT_SHARE * free_bytes):
            layer.check_kernels()
            console.print(
                f"{layer.moe.num_experts} experts of {spec.name} in {layer.format_name} on "
                f"{gpu.name}: every tile is compiled and timed, which takes minutes; what is done "
                "is kept",
                style="dim",
            )
            tiles = load_tiles(settings.cache_directory, gpu)
            time_call = time_on(api, torch.cuda.current_stream(api.device))
            for step in measure_layer(layer, tiles, time_call, is_again=is_again):
                found.append(step)
                store_tiles(settings.cache_directory, gpu, step.tiles)
                console.print(f"{step.tokens_per_expert} tokens per expert", style="dim")
            del layer  # before the next one takes its memory
    if found:
        Console().print(tiles_table(f"{spec.name} on {gpu.name}", found))
    else:
        console.print("all tiles were measured before; --again measures them again", style="dim")
    path = settings.cache_directory / gpu.file_name
    console.print(f"kept in {path}; engines on this GPU use it", style="dim")


def tiles_table(title: str, steps: Iterable[BucketTiles]) -> Table:
    """The choices, and what they gain over the usual tiles."""
    table = Table(title=title)
    columns = (
        "format",
        "tokens per expert",
        "outputs",
        "rows",
        "warps",
        "stages",
        "a layer",
        "usual",
        "gain",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for step in steps:
        shape = step.shape
        table.add_row(
            step.format_name,
            *(
                f"{size}"
                for size in (
                    step.tokens_per_expert, shape.outputs, shape.rows, shape.warps, shape.stages
                )
            ),
            format_seconds(step.best_s),
            format_seconds(step.usual_s),
            f"{step.usual_s / step.best_s:.2f} x",
        )  # fmt: skip
    return table


def _check_gpu() -> None:
    if torch.cuda.is_available() and find_spec("triton") is not None:
        return
    missing = "Triton is not installed" if torch.cuda.is_available() else "torch sees no GPU"
    raise ConfigError(
        f"--tiles times kernels on a GPU, and {missing} (torch {torch.__version__}): it needs an "
        f"NVIDIA GPU of capability {'.'.join(map(str, OLDEST_CAPABILITY))} or newer, a torch that "
        "is built for CUDA, and Triton"
    )


Row = tuple[str, str, str]
MAX_SECONDS = 60.0
Out = Annotated[Path | None, typer.Option(help="Also write the rates to this JSON file.")]
Seconds = Annotated[
    float, typer.Option(min=1, max=MAX_SECONDS, help="Measure for this many seconds.")
]
NumThreads = Annotated[
    int | None,
    typer.Option(min=1, help="Measure with this many threads; by default one for each core."),
]
Again = Annotated[
    bool, typer.Option("--again", help="Measure again even if this machine was measured before.")
]
Tiles = Annotated[
    bool,
    typer.Option(
        "--tiles",
        help="Find the fastest tiles of the kernels for the experts of --model on this GPU "
        "instead, which takes minutes, and keep them for all models of such shapes.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Find the tiles of this model for --tiles: a directory, or a name that raymoe plan "
        "takes."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the rates as one JSON object.")]


def run(
    *,
    out: Out = None,
    seconds: Seconds = USUAL_SECONDS,
    num_threads: NumThreads = None,
    again: Again = False,
    tiles: Tiles = False,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Measure in a minute what raymoe's kernels reach on this machine, its memory, GPU and link.

    The rates are kept for this processor, memory, GPU and number of threads, and every plan for
    this machine is made with them. Other programs that run meanwhile make them too low: rates that
    cannot be true are shown, but not kept.
    """
    if tiles:
        run_tiles(model, is_again=again)
        return
    if model is not None:
        raise ConfigError(f"--model {model} is for --tiles; a profile is of the machine alone")
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no directory {out.absolute().parent}")
    settings = Settings.from_environment()
    console = Console(stderr=True)
    console.print(
        f"measuring for up to {seconds:.0f} s; other programs that run meanwhile make rates too "
        "low",
        style="dim",
    )
    hardware, path = obtain_profile(
        settings.cache_directory,
        num_threads or settings.num_threads,
        seconds=seconds,
        is_fresh=again,
    )
    if as_json:
        typer.echo(to_json(hardware), nl=False)
    else:
        Console().print(table_of(hardware))
    is_written = out is not None and not find_problems(hardware)
    if out is not None and is_written:
        hardware.to_file(out)
        console.print(f"written to {out}", style="dim")
    if path is not None:
        console.print(f"kept in {path}; --again measures again", style="dim")
    elif not is_written:
        raise ExecutionError(
            "these rates are not kept, for the reason that the warning above gives; run raymoe "
            "profile again when nothing else runs"
        )


def table_of(hardware: HardwareSpec) -> Table:
    """Everything that was measured, a line for each."""
    table = Table(title=f"{hardware.name}: {hardware.num_cores} threads")
    table.add_column("what")
    table.add_column("size", justify="right")
    table.add_column("rate", justify="right")
    for row in _rows(hardware):
        table.add_row(*row)
    return table


def _rows(hardware: HardwareSpec) -> Iterator[Row]:
    yield "host memory that may be used", "", format_bytes(hardware.host_memory_bytes)
    yield "host memory, read", "", _bytes(hardware.host_bytes_per_s)
    yield "host copy, pageable to pinned", "64 MiB", _bytes(hardware.host_copy_bytes_per_s)
    yield "bfloat16 operations of the cores", "", _flop(hardware.host_flop_per_s)
    if hardware.host_curves is not None:
        yield from _host_rows(hardware.host_curves)
    if hardware.has_gpu:
        yield "device memory", "", format_bytes(hardware.gpu_memory_bytes)
        yield "device memory, copy", "", _bytes(hardware.gpu_bytes_per_s)
        yield "link, pinned to device", "", _bytes(hardware.htod_bytes_per_s)
        yield "link, device to pinned", "", _bytes(hardware.dtoh_bytes_per_s)
    if hardware.device_curves is not None:
        yield from _device_rows(hardware.device_curves)


def _host_rows(curves: HostCurves) -> Iterator[Row]:
    yield from _flop_rows("projection", "rows", curves.product_flop_per_s)
    yield from _flop_rows("experts", "rows each", curves.expert_flop_per_s)
    yield from _byte_rows("decode attention", "context", curves.attention_bytes_per_s)
    yield from _byte_rows("decode attention", "threads", curves.attention_bytes_per_s_of_threads)
    yield "decode attention, many heads", "", _flop(curves.attention_flop_per_s)
    yield from _flop_rows("prefill attention", "prompt", curves.prefill_flop_per_s)
    yield "norms and rotary embeddings", "", _bytes(curves.activation_bytes_per_s)
    for size, overhead_s in curves.task_overhead_s.points if curves.task_overhead_s else ():
        yield "overhead of a task", f"{size:g} tokens", format_seconds(overhead_s)


def _device_rows(curves: DeviceCurves) -> Iterator[Row]:
    yield "link, pageable to device", "", _bytes(curves.pageable_htod_bytes_per_s)
    yield "link, device to pageable", "", _bytes(curves.pageable_dtoh_bytes_per_s)
    yield "link, both directions at once, to device", "", _bytes(curves.duplex_htod_bytes_per_s)
    yield "link, both directions at once, to pinned", "", _bytes(curves.duplex_dtoh_bytes_per_s)
    yield "link, to device during attention on the CPU", "", _bytes(curves.busy_htod_bytes_per_s)
    yield "attention on the CPU during these copies", "", _bytes(curves.busy_attention_bytes_per_s)
    yield from _flop_rows("projection, GPU", "rows", curves.product_flop_per_s)
    yield from _flop_rows("expert, GPU", "rows", curves.expert_flop_per_s)
    for bits in (8, 4):
        stored: Curve | None = getattr(curves, f"expert_flop_per_s_of_{bits}_bits")
        if stored is not None:
            yield from _flop_rows(f"expert of {bits} bits, GPU", "rows", stored)
    if curves.attention_bytes_per_s is not None:
        yield from _byte_rows("decode attention, GPU", "context", curves.attention_bytes_per_s)
    if curves.prefill_flop_per_s is not None:
        yield from _flop_rows("prefill attention, GPU", "prompt", curves.prefill_flop_per_s)
    if curves.state_bytes_per_s is not None:
        yield "states of a decode step, GPU", "", _bytes(curves.state_bytes_per_s)
    if curves.tasks_per_s is not None:
        yield "overhead of a task, GPU", "", format_seconds(1 / curves.tasks_per_s)


def _flop_rows(what: str, unit: str, curve: Curve) -> Iterator[Row]:
    for size, rate in curve.points:
        yield what, f"{round(size, 1):g} {unit}", _flop(rate)


def _byte_rows(what: str, unit: str, curve: Curve) -> Iterator[Row]:
    for size, rate in curve.points:
        yield what, f"{size:g} {unit}", _bytes(rate)


def _bytes(rate: float) -> str:
    return f"{rate / GB:.1f} GB/s"


def _flop(rate: float) -> str:
    return f"{rate / GB:.0f} GFLOP/s"
