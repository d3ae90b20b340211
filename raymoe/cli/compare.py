"""`raymoe compare`: schedules side by side on an emulated device, predicted and measured."""

import contextlib
import gc
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from raymoe.cli import size
from raymoe.config import EngineConfig, Settings
from raymoe.device.emulated import EmulatedDevice
from raymoe.engine.rank_model import LoadJob, RankModel, load_streamed
from raymoe.errors import ConfigError, UnknownOptionError
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.measure.host import make_batch
from raymoe.memory.weights import WeightStore
from raymoe.plan.cost import StepCost
from raymoe.plan.placement import layer_sizes
from raymoe.plan.policy import PAGE_BYTES, DevicePolicy, Policy
from raymoe.plan.work import MicroBatchShape, ModelWork
from raymoe.runtime.micro_batches import CutBatch
from raymoe.schedule.builders import MAX_MICRO_BATCHES, STREAMING_BUILDERS
from raymoe.schedule.draw import draw_chrome_trace, draw_svg
from raymoe.schedule.graph import Resource, Schedule
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.timeline import Instant, Timeline, bound_by, compare, gap, simulate
from raymoe.specs.files import write_file
from raymoe.specs.hardware import HardwareSpec, hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from raymoe.specs.weight_format import BFLOAT16_BYTES
from raymoe.units import GIB, ceil_div, format_seconds

STAND_IN_ROWS, STAND_IN_CONTEXT = 2, 40  # of a micro-batch, where another model sets the pace


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """What each schedule does once.

    Attributes:
        micro_batch_rows: Sequences of each, one new token each.
        resident_share: Share of the weights that stays on the device, 0..1.
    """

    num_micro_batches: int = 14
    micro_batch_rows: int = 36
    context: int = 482
    resident_share: float = 0.0
    page_bytes: int = PAGE_BYTES
    cpu_attention_fraction: float = 1.0

    @property
    def num_rows(self) -> int:
        return self.num_micro_batches * self.micro_batch_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    name: str
    num_rows: int
    schedule: Schedule
    predicted: Timeline
    measured: Timeline

    @property
    def gap(self) -> float:
        return gap(self.predicted, self.measured)

    @property
    def bound(self) -> Resource:
        """The resource on which the predicted critical path spends most of its time."""
        return bound_by(self.schedule, self.predicted)

    @property
    def tokens_per_s(self) -> float:
        return self.num_rows / self.measured.makespan_s


def compare_schedules(
    model: Path,
    hardware: HardwareSpec,
    names: Sequence[str],
    step: DecodeBatch,
    *,
    costs_of: ModelSpec | None = None,
    time_scale: float = 1.0,
) -> Iterator[Comparison]:
    """Run each schedule once after a step that warms it up; yields as they end.

    Args:
        model: Directory of the model that computes.
        hardware: Its speed is emulated; it must have a GPU.
        costs_of: The model by whose sizes the time of a layer is computed; `model` by default.
        time_scale: Emulated seconds per second of the hardware; figures are divided by it.

    Raises:
        ConfigError: `costs_of` has fewer layers than `model`.
    """
    spec = ModelSpec.from_directory(model)
    if costs_of is not None and costs_of.num_layers < spec.num_layers:
        raise ConfigError(
            f"--costs-of {costs_of.name} has {costs_of.num_layers} layers; it needs at least the "
            f"{spec.num_layers} of --model {model}"
        )
    if costs_of is not None:
        costs_of = replace(costs_of, layers=costs_of.layers[: spec.num_layers])
    for name in names:
        yield _Run(spec, model, hardware, name, step, costs_of).compare(time_scale)


class _Run:
    def __init__(  # noqa: PLR0917 - the arguments of compare_schedules
        self,
        spec: ModelSpec,
        directory: Path,
        hardware: HardwareSpec,
        name: str,
        step: DecodeBatch,
        costs_of: ModelSpec | None,
    ) -> None:
        self._spec, self._directory, self._hardware = spec, directory, hardware
        self._name, self._step = name, step
        self._num_micro_batches = min(
            step.num_micro_batches, MAX_MICRO_BATCHES.get(name, step.num_micro_batches)
        )
        self._paced = costs_of or spec
        is_stand_in = costs_of is not None
        self._rows = STAND_IN_ROWS * self._num_micro_batches if is_stand_in else step.num_rows
        self._context = STAND_IN_CONTEXT if is_stand_in else step.context

    def compare(self, time_scale: float) -> Comparison:
        memory_bytes = max(self._hardware.gpu_memory_bytes, 64 * GIB)
        with contextlib.closing(EmulatedDevice(memory_bytes, Instant(), time_scale)) as device:
            model, schedules = self._model(), list[Schedule]()

            def set_costs(_cut: CutBatch, schedule: Schedule, _form: int) -> None:
                schedules.append(schedule)
                if len(schedules) > 1:  # the first step warms up
                    device.cost = self._cost(schedule, model)

            runner = load_streamed(model, device, set_costs)
            batch = make_batch(self._rows, self._context, self._spec.vocab_size)
            runner.time(batch)
            with _without_collector():
                measured = runner.time(batch)
            runner.close()
        return Comparison(
            name=self._name,
            num_rows=self._step.num_rows,
            schedule=schedules[-1],
            predicted=simulate(schedules[-1], device.cost),
            measured=measured.scaled(1 / time_scale),
        )

    def _model(self) -> RankModel:
        policy = Policy(
            max_num_seqs=self._rows,
            max_num_batched_tokens=self._rows,
            max_prefill_chunk_tokens=1,
            num_kv_blocks=self._rows * ceil_div(self._context, BLOCK_TOKENS),
            device=DevicePolicy(
                num_micro_batches=self._num_micro_batches,
                page_bytes=self._page_bytes(),
                resident_bytes=int(self._step.resident_share * self._layer_bytes(self._spec, 4)),
                cpu_attention_fraction=self._step.cpu_attention_fraction,
            ),
        )
        job = LoadJob(
            directory=self._directory,
            config=EngineConfig(),
            settings=Settings(),
            device="emulated",
            dtype=torch.float32,
            kv_dtype=torch.float32,
            hardware=self._hardware,
            schedule=self._name,
            policy=policy,
            num_torch_threads=1,
            step_limit_s=math.inf,
        )
        return RankModel(
            job=job, spec=self._spec, weights=WeightStore.open(self._spec, self._directory)
        )

    def _page_bytes(self) -> int:
        """Pages of the computing model, about as many as those of the one that sets the pace."""
        ratio = self._layer_bytes(self._spec, 4) / self._layer_bytes(self._paced, BFLOAT16_BYTES)
        return max(1, int(self._step.page_bytes * ratio))

    @staticmethod
    def _layer_bytes(spec: ModelSpec, bytes_per_element: int) -> int:
        return sum(size.total for size in layer_sizes(spec, bytes_per_element))

    def _cost(self, schedule: Schedule, model: RankModel) -> StepCost:
        scale = self._layer_bytes(self._paced, BFLOAT16_BYTES) / self._layer_bytes(self._spec, 4)
        rows = self._step.num_rows // self._num_micro_batches
        micro_batch = MicroBatchShape.decode(
            rows, self._step.context, model.placement.cpu_attention_fraction
        )
        return StepCost.of_schedule(
            schedule,
            ModelWork.of(self._paced, BFLOAT16_BYTES),
            self._hardware,
            micro_batches=(micro_batch,) * self._num_micro_batches,
            layers=tuple(_scaled(layer, scale) for layer in model.placement.layers),
        )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _scaled(layer: LayerPlacement, scale: float) -> LayerPlacement:
    return replace(layer, page_bytes=tuple(round(scale * size) for size in layer.page_bytes))


def share(text: object) -> float:
    """Parser of an option that takes a number from 0 to 1; typer sends the default through it."""
    number = float(str(text))
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{number:g} is not a share; it takes a number from 0 to 1")
    return number


ResidentShare = Annotated[
    float,
    typer.Option(
        parser=share,
        metavar="SHARE",
        help="Keep this share of the weights on the device, from 0 to 1.",
    ),
]
PageBytes = Annotated[
    int,
    typer.Option(
        parser=size,
        metavar="SIZE",
        help="Copy weights in pages of at most this size.",
        show_default="64MiB",
    ),
]
CpuAttentionFraction = Annotated[
    float,
    typer.Option(
        parser=share,
        metavar="SHARE",
        help="Compute attention on the CPU for this share of the sequences, from 0 to 1.",
    ),
]
Model = Annotated[
    Path, typer.Option(help="Compute with the model in this directory, which may be small.")
]
Hardware = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Let each task take as long as on this GPU, such as t4, l4 or a5000."
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Run this schedule; by default all are run. Repeat the option for several.",
    ),
]
CostsOf = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Let each layer take as long as one of this model, such as mixtral-8x7b, instead of "
        "the model of --model.",
    ),
]
MicroBatches = Annotated[
    int, typer.Option(min=1, metavar="N", help="Divide the step into this many micro-batches.")
]
Rows = Annotated[
    int, typer.Option(min=1, metavar="N", help="Decode this many sequences in each micro-batch.")
]
Context = Annotated[
    int, typer.Option(min=2, metavar="N", help="Let each sequence have this many tokens.")
]
TimeScale = Annotated[
    float,
    typer.Option(
        min=0.001,
        metavar="X",
        help="Let everything take this many times as long, so that this machine keeps up; the "
        "figures are divided by it.",
    ),
]
Out = Annotated[Path, typer.Option(help="Write schedules.svg and trace.json to this directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")]


def run(  # noqa: PLR0913 - the options of a command
    *,
    model: Model,
    hardware: Hardware = "l4",
    schedule: Names = None,
    costs_of: CostsOf = None,
    num_micro_batches: MicroBatches = 14,
    micro_batch_rows: Rows = 36,
    context: Context = 482,
    resident_share: ResidentShare = 0.0,
    page_bytes: PageBytes = PAGE_BYTES,
    cpu_attention_fraction: CpuAttentionFraction = 1.0,
    time_scale: TimeScale = 1.0,
    out: Out = Path("raymoe-compare"),
    as_json: AsJson = False,
) -> None:
    """Run one decode step by each schedule on an emulated GPU, whose memory is host memory.

    Every schedule computes the same tokens with the same kernels, and each task takes as long as
    it would on the GPU of --hardware. The command writes a Gantt chart of all schedules on one
    axis, predicted above measured, and a trace for chrome://tracing or Perfetto.
    """
    names = schedule or list(STREAMING_BUILDERS)
    _check_names(names)
    console = Console(stderr=True)
    comparisons = []
    step = DecodeBatch(
        num_micro_batches=num_micro_batches, micro_batch_rows=micro_batch_rows, context=context,
        resident_share=resident_share, page_bytes=page_bytes,
        cpu_attention_fraction=cpu_attention_fraction,
    )  # fmt: skip
    for comparison in compare_schedules(
        model,
        hardware_preset(hardware),
        names,
        step,
        costs_of=None if costs_of is None else model_preset(costs_of),
        time_scale=time_scale,
    ):
        comparisons.append(comparison)
        line = compare(comparison.predicted, comparison.measured)
        console.print(f"{comparison.name}: {line}", style="dim")
    if as_json:
        typer.echo(json.dumps({"hardware": hardware, "schedules": [*map(_plain, comparisons)]}))
    else:
        Console().print(_table(comparisons, f"one decode step on {hardware}"))
    _draw(comparisons, f"decode step, {hardware}", out)
    console.print(f"{out / 'schedules.svg'}, {out / 'trace.json'}", style="dim")


def _check_names(names: list[str]) -> None:
    for name in names:
        if name not in STREAMING_BUILDERS:
            raise UnknownOptionError(name, STREAMING_BUILDERS, "schedule")


def _draw(comparisons: list[Comparison], title: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    timelines = [timeline for each in comparisons for timeline in _named(each)]
    write_file(out / "schedules.svg", draw_svg(timelines, title=title))
    write_file(out / "trace.json", draw_chrome_trace(timelines))


def _named(comparison: Comparison) -> tuple[Timeline, Timeline]:
    name = comparison.name
    return (
        Timeline(f"{name}, predicted", comparison.predicted.spans),
        Timeline(f"{name}, measured", comparison.measured.spans),
    )


LANES = (Resource.GPU, Resource.CPU, Resource.HTOD, Resource.DTOH)


def _plain(each: Comparison) -> dict[str, Any]:
    return {
        "schedule": each.name,
        "predicted_s": each.predicted.makespan_s,
        "measured_s": each.measured.makespan_s,
        "gap": each.gap,
        "utilization": {lane: each.measured.utilization(lane) for lane in LANES},
        "bound": each.bound,
        "tokens_per_s": each.tokens_per_s,
    }


def _table(comparisons: list[Comparison], title: str) -> Table:
    """No wider than 80 columns."""
    table = Table(
        title=f"{title}; gpu, cpu, htod, dtoh: busy time in %", box=None, padding=(0, 1, 0, 0)
    )
    table.add_column("schedule", no_wrap=True)
    for column in ("predicted", "measured", "gap %", *LANES, "bound", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in comparisons:
        table.add_row(
            each.name,
            format_seconds(each.predicted.makespan_s),
            format_seconds(each.measured.makespan_s),
            f"{100 * each.gap:+.1f}",
            *(f"{100 * each.measured.utilization(lane):.0f}" for lane in LANES),
            each.bound,
            f"{each.tokens_per_s:,.1f}",
        )
    return table
