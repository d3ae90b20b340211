"""`raymoe bench --suite structured`: do structured outputs that hurt slow down plain rows?"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from raymoe.bench.structured import compare_beside_hostile, structured_engine
from raymoe.bench.workloads import SHAPES
from raymoe.errors import ConfigError, UnknownOptionError
from raymoe.units import format_seconds

NUM_PLAIN, NUM_HOSTILE, NEW_TOKENS = 1000, 50, 64
SMALL = {"tiny": (60, 3, 8)}  # for trying the suite itself


def run_structured(
    shapes: Sequence[str], num_threads: int, repetitions: int, directory: Path
) -> None:
    """Run the rows alone and beside the hostile ones, in turns; print and keep the figures.

    Raises:
        ConfigError: The shape does not exist, or there are several.
        ExecutionError: A row was disturbed.
    """
    if len(shapes) > 1:
        raise ConfigError("--suite structured takes one --shape")
    shape = shapes[0] if shapes else "mixtral"
    if shape not in SHAPES:
        raise UnknownOptionError(shape, SHAPES, "shape")
    num_plain, num_hostile, new_tokens = SMALL.get(shape, (NUM_PLAIN, NUM_HOSTILE, NEW_TOKENS))
    console = Console(stderr=True)
    directory.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="raymoe-") as model,
        structured_engine(
            shape, Path(model), num_rows=num_plain, new_tokens=new_tokens, num_threads=num_threads
        ) as engine,
    ):
        result = compare_beside_hostile(
            engine,
            num_plain=num_plain,
            num_hostile=num_hostile,
            new_tokens=new_tokens,
            repetitions=repetitions,
            report=lambda text: console.print(text, style="dim"),
        )
    with (directory / "structured.jsonl").open("a") as lines:
        lines.write(result.to_json() + "\n")
    pairs = ", ".join(
        f"{format_seconds(alone)} and {format_seconds(beside)}"
        for alone, beside in zip(result.alone_s, result.beside_s, strict=True)
    )
    stolen = max(*result.alone_stolen, *result.beside_stolen)
    Console(soft_wrap=True).print(
        f"{num_plain} plain rows of {new_tokens} tokens, alone and beside {num_hostile} hostile "
        f"ones: {pairs}; {100 * result.pace:.1f} % as fast (median of {repetitions}), the same "
        f"tokens; all hostile rows ended as error rows, the last after "
        f"{format_seconds(max(result.hostile_s))}; other machines took up to {100 * stolen:.1f} % "
        "of the cores"
    )
