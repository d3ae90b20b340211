"""The options of `raymoe bench`, with their help."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from raymoe.bench.contenders import CONTENDERS
from raymoe.bench.gpu.contenders import GPU_CONTENDERS
from raymoe.bench.gpu.shapes import GPU_SHAPES
from raymoe.bench.gpu.workloads import GPU_WORKLOADS
from raymoe.bench.workloads import SHAPES, WORKLOADS
from raymoe.cli.options import size

SUITES = ("cpu", "gpu", "scale", "million")
CPU, GPU = "Suite cpu", "Suite gpu"
NODES = "Suites scale and million"
NODE_SUITES = ("scale", "million")

Suite = Annotated[
    str,
    typer.Option(
        help="cpu: engines on the cores of this machine. gpu: schedules of the papers, each with "
        "its own policy, and accelerate, on one GPU. scale, million: many nodes whose engines only "
        "wait, on a local cluster."
    ),
]
Shapes = Annotated[
    list[str],
    typer.Option(
        "--shape",
        help=f"Models, repeatable. cpu: {', '.join(SHAPES)}; gpu: {', '.join(GPU_SHAPES)}.",
    ),
]
Workloads = Annotated[
    list[str],
    typer.Option(
        "--workload",
        help=f"Row lengths, repeatable. cpu: {', '.join(WORKLOADS)}; "
        f"gpu: {', '.join(GPU_WORKLOADS)} (prompts and generated tokens as published).",
    ),
]
Contenders = Annotated[
    list[str],
    typer.Option(
        "--contender",
        help=f"Repeatable. cpu: {', '.join(CONTENDERS)}; gpu: {', '.join(GPU_CONTENDERS)}.",
    ),
]
Repetitions = Annotated[
    int, typer.Option(min=1, help="Runs of each; medians are shown.", rich_help_panel=CPU)
]
Phases = Annotated[
    bool,
    typer.Option(
        "--phases",
        help="Time the prefill apart; takes about twice as long.",
        rich_help_panel=CPU,
    ),
]
Kernels = Annotated[
    bool,
    typer.Option(
        "--kernels",
        help="Measure kernels, not engines; about four minutes.",
        rich_help_panel=CPU,
    ),
]
Passes = Annotated[
    bool,
    typer.Option(
        "--passes",
        help="Our passes, predicted with this machine's profile, too.",
        rich_help_panel=CPU,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="cuda; or emulated, made of host memory, to try the suite without a GPU.",
        rich_help_panel=GPU,
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="Whose pace --device emulated takes on: l4, t4, a5000, ...", rich_help_panel=GPU
    ),
]
DeviceMemory = Annotated[
    int | None,
    typer.Option(
        parser=size,
        metavar="SIZE",
        help="Cap, to stand for a smaller GPU: 16GiB; all that is free by default.",
        rich_help_panel=GPU,
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        parser=size,
        metavar="SIZE",
        help="Cap; 0.85 of what is available by default.",
        rich_help_panel=GPU,
    ),
]
Layers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The first layers of each shape; as many as host memory and time allow by default.",
        rich_help_panel=GPU,
    ),
]
PartLimit = Annotated[
    float,
    typer.Option(
        min=10,
        help="Seconds of a part, for half of which its rows are chosen; beyond, it has failed.",
        rich_help_panel=GPU,
    ),
]
MostRows = Annotated[int, typer.Option(min=1, help="Rows of a part, at most.", rich_help_panel=GPU)]
Again = Annotated[
    bool,
    typer.Option(
        "--again",
        help="Also run parts that --out has results of; those that failed run again anyway.",
        rich_help_panel=GPU,
    ),
]
NumThreads = Annotated[int | None, typer.Option(min=1, help="Cores; all by default.")]
Out = Annotated[Path, typer.Option(help="Directory for checkpoints (kept), results and pictures.")]
NumActors = Annotated[
    list[int] | None,
    typer.Option("--actors", min=1, help="Nodes; repeatable for scale.", rich_help_panel=NODES),
]
NumRows = Annotated[
    int | None,
    typer.Option(
        "--rows", min=100, help="Of an actor, or of million in all.", rich_help_panel=NODES
    ),
]
Speedup = Annotated[
    float | None,
    typer.Option(help="Passes are so many times shorter than real ones.", rich_help_panel=NODES),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """What to run; None takes the suite's own."""

    actors: Sequence[int] | None = None
    rows: int | None = None
    speedup: float | None = None
    out: Path = Path("raymoe-bench")
