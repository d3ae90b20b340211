"""A plan for people: its policy, memory and prediction, and what a pass looks like."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from raymoe.cli.options import model_by_name, size
from raymoe.config import MAX_RANKS
from raymoe.errors import ConfigError, UnknownOptionError
from raymoe.plan.device_pass import KV_BLOCK_TOKENS, DevicePass, StreamedPasses
from raymoe.plan.pictures import PlanOn, roofline_picture, throughput_picture
from raymoe.plan.plan import DEFAULT_WORKLOAD, RESOURCE_NAMES, Plan
from raymoe.plan.policy import DevicePolicy, Footprint
from raymoe.plan.search import find_plan, of_one_rank
from raymoe.plan.what_if import next_steps
from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.draw import draw_text
from raymoe.schedule.timeline import Timeline, middle_layers
from raymoe.specs.hardware import HARDWARE_PRESETS, HardwareSpec, find_hardware
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS
from raymoe.specs.workload import Workload
from raymoe.units import format_bytes, format_seconds

Row = tuple[str, str]
GANTT_LAYERS = 2  # two kinds of layers may take turns
AROUND_LANE = 20  # letters: the longest name of a lane, its frame and busy share


def policy_table(plan: Plan) -> Table:
    """How a run is cut."""
    return _two_columns("policy", _policy_rows(plan))


def memory_table(plan: Plan) -> Table:
    """What needs what, in each memory, beside what there is."""
    table = Table(title="memory")
    table.add_column("where")
    table.add_column("for what")
    table.add_column("size", justify="right")
    hardware = plan.hardware
    if plan.device_footprint is not None:
        _add_memory(table, plan.device_footprint, hardware.gpu_memory_bytes)
    _add_memory(table, plan.footprint, hardware.host_memory_bytes)
    return table


def prediction_table(plan: Plan, price_per_hour: float | None) -> Table:
    """What the job will take; its cost where the price of the node is known."""
    return _two_columns("prediction", _prediction_rows(plan, price_per_hour))


def gantt(decode: Timeline, width: int) -> str:
    """The layers in the middle of a decode pass as text of at most so many letters a line."""
    few, shown, num_layers = middle_layers(decode, GANTT_LAYERS)
    title = (
        f"{shown} of the {num_layers} layers of a decode pass, which takes "
        f"{format_seconds(decode.makespan_s)}"
    )
    few = Timeline("", few.spans)
    return f"{title}\n{draw_text([few], columns=max(1, width - AROUND_LANE))}"


def _policy_rows(plan: Plan) -> Iterator[Row]:
    policy = plan.policy
    if plan.num_ranks > 1:
        yield "tensor parallel", f"{plan.num_ranks} GPUs share each pass; sizes are of one"
    yield "schedule", plan.schedule
    yield "batch", f"{policy.batch_size:,} sequences"
    yield (
        "pass",
        f"{policy.pass_tokens:,} tokens, {policy.prefill_chunk_tokens:,} of a prompt at most",
    )
    yield "KV cache", f"{policy.num_kv_blocks:,} blocks of {KV_BLOCK_TOKENS} tokens"
    if isinstance(plan.passes, DevicePass):
        yield from _device_rows(plan.passes.passes)


def _device_rows(passes: StreamedPasses) -> Iterator[Row]:
    device, share = passes.device, 100 * passes.cpu_attention_fraction
    yield "waves of a pass", str(passes.num_waves)
    if passes.schedule == "waves":  # the others fix these themselves
        yield "waves that attend ahead", str(device.look_ahead)
        yield "experts run", _group(device)
    yield "decode attention", f"{share:.0f} % on the CPU, {100 - share:.0f} % on the GPU"
    cut = passes.cut
    rest = f"the rest in pages of {format_bytes(cut.page_length)}"
    kept = f"{format_bytes(cut.resident_bytes)} resident"
    yield "weights", f"{kept}, {rest if cut.streamed_bytes else 'which is all of them'}"


def _group(device: DevicePolicy) -> str:
    if device.waves_per_group >= device.num_waves:
        return "once for the pass"
    return f"every {device.waves_per_group} waves" if device.waves_per_group > 1 else "every wave"


def _prediction_rows(plan: Plan, price_per_hour: float | None) -> Iterator[Row]:
    job = plan.job
    yield "decoding is bound by", RESOURCE_NAMES[plan.bound]
    yield "prefill", f"{plan.prefill_tokens_per_s:,.1f} prompt tokens/s"
    yield "decode", f"{plan.decode_tokens_per_s:,.1f} tokens/s"
    yield "end to end", f"{plan.tokens_per_s:,.1f} generated tokens/s"
    yield "the job", f"{format_seconds(job.seconds)} in {job.num_passes:,.0f} passes"
    if price_per_hour is not None:
        million = plan.cost_per_million_tokens(price_per_hour)
        yield "cost", f"{million:.3g} per million generated tokens"
        yield "cost of the job", f"{price_per_hour * job.seconds / 3600:.3g}"


def _two_columns(title: str, rows: Iterable[Row]) -> Table:
    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _add_memory(table: Table, footprint: Footprint, available_bytes: int) -> None:
    for index, (purpose, num_bytes) in enumerate(footprint.parts):
        table.add_row("" if index else footprint.memory, purpose, format_bytes(num_bytes))
    table.add_row("", "total", format_bytes(footprint.total), style="bold")
    table.add_row("", "available", format_bytes(available_bytes), end_section=True)


SCHEDULES = ("auto", "resident", *STREAMING_BUILDERS)

Model = Annotated[
    str,
    typer.Option(
        help=f"A directory with a config.json, or one of {', '.join(MODEL_PRESETS)}.",
        metavar="NAME|DIR",
    ),
]
Hardware = Annotated[
    str,
    typer.Option(
        help=f"A file that raymoe profile wrote, or one of {', '.join(HARDWARE_PRESETS)}.",
        metavar="NAME|FILE",
    ),
]
PromptLen = Annotated[int, typer.Option(min=1, help="Mean tokens of a prompt.")]
GenLen = Annotated[int, typer.Option(min=1, help="Mean tokens to generate for a row.")]
NumRows = Annotated[int, typer.Option(min=1, help="Rows of the job.")]
ScheduleName = Annotated[
    str,
    typer.Option(
        help=f"Order of work on a GPU: one of {', '.join(SCHEDULES)}.",
        metavar="NAME",
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        parser=size,
        metavar="SIZE",
        help="Host memory that may be used: 192GiB, ...; by default what the node has.",
    ),
]
DeviceMemory = Annotated[
    int | None,
    typer.Option(parser=size, metavar="SIZE", help="The same of GPU memory: 16GiB, ..."),
]
MaxContext = Annotated[
    int | None,
    typer.Option(min=1, help="Longest row, prompt and all; by default what the model allows."),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        min=1,
        max=MAX_RANKS,
        help="GPUs of the node that share every pass; the plan is that of one of them.",
    ),
]
Price = Annotated[
    float | None, typer.Option(min=0.0, help="Of the node, to show the cost of tokens and job.")
]
WhatIf = Annotated[
    bool,
    typer.Option("--what-if", help="Show what more memory, link, cores or GPU would gain."),
]
Plot = Annotated[
    bool, typer.Option("--plot", help="Draw the node's roofline and throughput over host memory.")
]
Out = Annotated[Path, typer.Option(help="Directory for the pictures of --plot.")]


def run(  # noqa: PLR0913 - the options of a command
    *,
    model: Model,
    hardware: Hardware,
    prompt_len: PromptLen = DEFAULT_WORKLOAD.prompt_tokens,
    gen_len: GenLen = DEFAULT_WORKLOAD.generated_tokens,
    num_rows: NumRows = DEFAULT_WORKLOAD.num_rows,
    schedule: ScheduleName = "auto",
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    max_context: MaxContext = None,
    tensor_parallel: TensorParallel = 1,
    price_per_hour: Price = None,
    what_if: WhatIf = False,
    plot: Plot = False,
    out: Out = Path("raymoe-plan"),
) -> None:
    """Choose how to run a model on a node, and predict speed, time and cost of a job.

    Needs neither weights nor node. Prints policy, memory, what limits decoding,
    predicted rates, and a few layers of a pass. What does not fit is refused
    with the bytes that are missing.
    """
    spec = model_by_name(model)
    node = _node(hardware, host_memory, device_memory)
    workload = Workload(num_rows=num_rows, prompt_tokens=prompt_len, generated_tokens=gen_len)
    _check(spec, node, workload, schedule=schedule, max_context=max_context)
    spec, node = of_one_rank(spec, node, tensor_parallel)
    plan_on: PlanOn = partial(
        find_plan, spec, workload=workload, schedule=schedule, max_context_tokens=max_context
    )
    plan = plan_on(node)
    _print(plan, price_per_hour)
    if what_if:
        with _planning_others():
            table = _what_if_table(plan, plan_on)
        Console().print(table)
    if plot:
        with _planning_others():
            pictures = _pictures(plan, spec, plan_on)
        _write(pictures, out)


def _node(name: str, host_memory: int | None, device_memory: int | None) -> HardwareSpec:
    """The node with the memory that may be used of it."""
    node = find_hardware(name)
    if host_memory is not None:
        node = replace(node, host_memory_bytes=host_memory)
    if device_memory is not None:
        if not node.has_gpu:
            raise ConfigError(f"--device-memory: {node.name} has no GPU; leave it out")
        node = replace(node, gpu_memory_bytes=device_memory)
    return node


def _check(
    model: ModelSpec,
    node: HardwareSpec,
    workload: Workload,
    *,
    schedule: str,
    max_context: int | None,
) -> None:
    if schedule not in SCHEDULES:
        raise UnknownOptionError(schedule, SCHEDULES, "schedule")
    if schedule != "auto" and not node.has_gpu:
        raise ConfigError(f"--schedule {schedule}: {node.name} has no GPU; leave it out")
    longest = min(max_context or model.max_context_tokens, model.max_context_tokens)
    if workload.context_tokens > longest:
        raise ConfigError(
            f"a row has {workload.prompt_tokens} + {workload.generated_tokens} tokens; "
            f"{model.name} takes {longest}"
        )


def _print(plan: Plan, price_per_hour: float | None) -> None:
    console, workload = Console(), plan.workload
    console.print(
        f"{plan.model_name} on {plan.hardware.name}: {workload.num_rows:,} rows of "
        f"{workload.prompt_tokens:,} + {workload.generated_tokens:,} tokens",
        style="bold",
    )
    console.print(policy_table(plan))
    console.print(memory_table(plan))
    console.print(prediction_table(plan, price_per_hour))
    console.print(Text(gantt(plan.decode, console.width)))


def _what_if_table(plan: Plan, plan_on: PlanOn) -> Table:
    """What one more step of each resource would give; each is a plan of its own."""
    table = Table(title="what if")
    for column in ("more", "now", "then", "tokens/s", "gain", "bound"):
        table.add_column(column, justify="right" if column in {"tokens/s", "gain"} else "left")
    for step in next_steps(plan.hardware):
        then = plan_on(step.hardware)
        table.add_row(
            step.resource,
            step.before,
            step.after,
            f"{then.tokens_per_s:,.1f}",
            f"{100 * (then.tokens_per_s / plan.tokens_per_s - 1):+.0f} %",
            then.bound,
        )
    return table


def _pictures(plan: Plan, model: ModelSpec, plan_on: PlanOn) -> dict[str, str]:
    """Pictures by file name; where nothing streams there is one roof, and no picture of it."""
    pictures = {"throughput.svg": throughput_picture(plan, model, plan_on)}
    if isinstance(plan.passes, DevicePass):
        pictures["roofline.svg"] = roofline_picture(plan, plan.passes)
    return pictures


def _write(pictures: dict[str, str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (out / name).write_text(picture)
    Console(stderr=True).print(", ".join(str(out / name) for name in pictures), style="dim")


def _planning_others() -> Status:
    return Console(stderr=True).status("planning for other nodes")
