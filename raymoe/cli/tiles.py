"""`raymoe profile --tiles`: the fastest tiles of the expert kernels for a model on this GPU."""

from collections.abc import Iterable
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.table import Table

from raymoe.cli.options import model_by_name
from raymoe.config import Settings
from raymoe.device.cuda_api import TorchCuda
from raymoe.errors import ConfigError
from raymoe.kernels.device_experts_choice import OLDEST_CAPABILITY
from raymoe.measure.expert_tiles import Gpu, load_tiles, store_tiles
from raymoe.measure.model_tiles import (
    WEIGHT_SHARE,
    BucketTiles,
    ExpertLayer,
    measure_layer,
    time_on,
)
from raymoe.units import format_seconds


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
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if has_bfloat16 else torch.float16
    console, found = Console(stderr=True), []
    with api.thread_context():
        free_bytes, _ = torch.cuda.mem_get_info(api.device)
        layer = ExpertLayer.of(spec, dtype, api.device, WEIGHT_SHARE * free_bytes)
        layer.check_kernels()
        console.print(
            f"{layer.moe.num_experts} experts of {spec.name} on {gpu.name}: every tile is "
            "compiled and timed, which takes minutes; what is done is kept",
            style="dim",
        )
        tiles = load_tiles(settings.cache_directory, gpu)
        time_call = time_on(api, torch.cuda.current_stream(api.device))
        for step in measure_layer(layer, tiles, time_call, is_again=is_again):
            found.append(step)
            store_tiles(settings.cache_directory, gpu, step.tiles)
            console.print(f"{step.tokens_per_expert} tokens per expert", style="dim")
    if found:
        Console().print(tiles_table(f"{spec.name} on {gpu.name}", found))
    else:
        console.print("all of it was measured before; --again measures anew", style="dim")
    path = settings.cache_directory / gpu.file_name
    console.print(f"kept in {path}; engines on this GPU use it", style="dim")


def tiles_table(title: str, steps: Iterable[BucketTiles]) -> Table:
    """The choices, and what they gain over the usual tiles."""
    table = Table(title=title)
    columns = (
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
