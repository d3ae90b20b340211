"""`raymoe plan`: the policy for a model, a node and a job, what it will take, what would help."""

import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from raymoe.cli import model_by_name, size
from raymoe.cli.checks import check_money, check_number
from raymoe.cli.cluster_file import (
    DEFAULT_OUTPUT,
    DEFAULT_SOURCE,
    Output,
    Source,
    Spot,
    WantedFile,
    Write,
    WriteAs,
    price_of,
)
from raymoe.config import DTYPES, KV_DTYPES, MAX_RANKS, STATE_DTYPES
from raymoe.errors import ConfigError, InfeasiblePlanError, UnknownOptionError
from raymoe.plan.draw import roofline_picture, throughput_picture
from raymoe.plan.placement import Placement
from raymoe.plan.plan import DEFAULT_WORKLOAD, RESOURCE_NAMES, Plan
from raymoe.plan.policy import DevicePolicy, Footprint
from raymoe.plan.prediction import READ_BYTES_PER_S, Prediction, roughly
from raymoe.plan.rank import (
    MAX_NODES,
    MAX_PRICE,
    JobPlanner,
    Offer,
    PriceList,
    next_steps,
    notes_of,
    plan_in_budget,
    plan_in_time,
    rank,
    ranking_notes,
    read_prices,
)
from raymoe.plan.search import of_one_rank
from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.draw import draw_text
from raymoe.schedule.graph import Resource
from raymoe.schedule.timeline import Timeline, middle_layers
from raymoe.specs.adapter_config import base_and_adapter
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.files import kind_problem, read_text, write_file
from raymoe.specs.hardware import HARDWARE_PRESETS, HardwareSpec, find_hardware
from raymoe.specs.model import ModelSpec
from raymoe.specs.quantization import WEIGHTS, quantization_of
from raymoe.specs.weight_format import KV_ITEM_BYTES, PLAIN_FORMATS
from raymoe.specs.workload import TASKS, Workload
from raymoe.units import CURRENCY, GB, GIB, format_bytes, format_seconds

Row = tuple[str, str]
GANTT_LAYERS = 2  # two kinds of layers may take turns
AROUND_LANE = 20  # letters: the longest name of a lane, its frame and busy share
# A second; a thousand years.
DEADLINE_HOURS = (1 / 3600, 8.76e6)
MAX_ROWS = 10**18
HERE = "here"


def policy_table(plan: Plan) -> Table:
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


@dataclass(frozen=True, slots=True)
class Money:
    """The price of a node for an hour, and its currency; None where no cost is shown."""

    price_per_hour: float | None = None
    currency: str = CURRENCY


def prediction_table(plan: Plan, money: Money, num_nodes: int = 1) -> Table:
    """What the job will take; its cost where the price of the node is known."""
    return _two_columns("prediction", _prediction_rows(plan, money, num_nodes))


def gantt(decode: Timeline, width: int) -> str:
    """The layers in the middle of a decode step as text of at most so many letters a line."""
    few, shown, num_layers = middle_layers(decode, GANTT_LAYERS)
    title = (
        f"{shown} of the {num_layers} layers of a decode step, which takes "
        f"{format_seconds(decode.makespan_s)}"
    )
    few = Timeline("", few.spans)
    return f"{title}\n{draw_text([few], columns=max(1, width - AROUND_LANE))}"


def _policy_rows(plan: Plan) -> Iterator[Row]:
    policy = plan.policy
    if plan.num_ranks > 1:
        yield "tensor parallel", f"{plan.num_ranks} GPUs share each step; sizes are of one"
    yield "schedule", plan.schedule
    if plan.note:
        yield "device", plan.note
    entry = ", admitted at a constant rate" if policy.steady_admission else ""
    yield "batch", f"{policy.max_num_seqs:,} sequences{entry}"
    yield (
        "step",
        f"{policy.max_num_batched_tokens:,} tokens, "
        f"at most {policy.max_prefill_chunk_tokens:,} of one prompt",
    )
    yield "KV cache", f"{policy.num_kv_blocks:,} blocks of {KV_BLOCK_TOKENS} tokens"
    window = plan.steps.work.window
    if num_blocks := policy.num_window_blocks(window):
        yield "", f"{num_blocks:,} in layers with a window of {window:,} tokens"
    if plan.steps.placement.streams:
        yield from _device_rows(plan.steps.placement)


def _device_rows(placement: Placement) -> Iterator[Row]:
    device, share = placement.device, 100 * placement.cpu_attention_fraction
    yield "micro-batches of a step", str(placement.num_micro_batches)
    if placement.schedule == "micro_batches":  # the others fix these themselves
        yield "look-ahead of attention", f"{device.look_ahead} micro-batches"
        yield "experts are computed", _group(device)
    if any(size.has_states for size in placement.sizes):
        yield "states", "on the GPU" if device.states_on_device else "in host memory"
    yield "decode attention", f"{share:.0f} % on the CPU, {100 - share:.0f} % on the GPU"
    if device.cpu_experts_fraction:
        on_cores = f"{100 * device.cpu_experts_fraction:.3g} % of those that stream"
        yield "experts on the CPU", f"in each step none, {on_cores}, or all, whichever is fastest"
    rest = f"the rest in pages of {format_bytes(placement.page_length)}"
    kept = f"{format_bytes(placement.resident_bytes)} resident"
    yield "weights", f"{kept}, {rest if placement.streamed_bytes else 'which is all of them'}"
    if placement.ring_slots and placement.streamed_bytes:
        groups = f"{device.expert_groups} groups of experts a layer"
        yield "weight slots", f"a ring of {placement.ring_slots} of {groups}"


def _group(device: DevicePolicy) -> str:
    if device.micro_batches_per_group >= device.num_micro_batches:
        return "once for the step"
    return (
        f"every {device.micro_batches_per_group} micro-batches"
        if device.micro_batches_per_group > 1
        else "every micro-batch"
    )


def _prediction_rows(plan: Plan, money: Money, num_nodes: int) -> Iterator[Row]:
    workload, job, found = plan.workload, plan.job, Prediction.of(plan, num_nodes)
    what = "decoding" if workload.generates else "reading"
    yield f"{what} is bound by", RESOURCE_NAMES[plan.job_bound]
    yield "prefill", f"{plan.prefill_tokens_per_s:,.1f} prompt tokens/s"
    if workload.generates:
        yield "decode", f"{plan.decode_tokens_per_s:,.1f} tokens/s"
    yield "end to end", f"{plan.rate:,.1f} {found.unit}"
    if num_nodes > 1:
        rate = f"{found.tokens_per_s:,.1f} {found.unit}"
        yield f"{num_nodes:,} such nodes", f"{rate}, {workload.num_rows:,} rows each"
    if workload.shared_prompt_tokens:
        alone = plan.estimate(replace(workload, shared_prompt_tokens=0))
        yield (
            "shared prompts",
            f"{workload.shared_prompt_tokens:,} of {workload.prompt_tokens:,} tokens a row are "
            f"found in the KV cache; without, {format_seconds(alone.seconds)}",
        )
    yield (
        "time to load",
        f"about {roughly(found.loading_s)}, with a disk of {READ_BYTES_PER_S / GB:.0f} GB/s",
    )
    yield f"time to {found.verb}", f"{format_seconds(job.seconds)} in {job.num_steps:,.0f} steps"
    yield "time to write", f"about {roughly(found.writing_s)} after the last step"
    if money.price_per_hour is not None:
        yield "cost", found.cost_text(money.price_per_hour, money.currency, num_nodes)


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


LENGTH_COLUMNS = ("prompt_tokens", "generated_tokens")
MAX_LENGTHS = 4096  # rows of a file that are planned with; more change a plan by less than it errs
MAX_LENGTH = 10**9


def read_lengths(path: Path, num_rows: int | None) -> Workload:
    """The job whose rows have the lengths in a file; `num_rows` is that of the file by default.

    Raises:
        ConfigError: It cannot be read, lacks a column, or has a length below 1; names the row.
    """
    rows = _length_rows(path)
    lengths = [_lengths_of_row(path, index, row) for index, row in enumerate(rows)]
    if not lengths:
        raise ConfigError(f"--lengths {path} has no rows")
    if len(lengths) > MAX_LENGTHS:
        planned = random.Random(0).sample(lengths, MAX_LENGTHS)
    else:
        planned = lengths
    return replace(Workload.of_rows(tuple(planned)), num_rows=num_rows or len(lengths))


def _length_rows(path: Path) -> list[Any]:
    is_table = path.suffix in {".parquet", ".pq"}
    text = "" if is_table else read_text(path, what="--lengths", max_bytes=GIB)
    problem = kind_problem(path, follows_links=True)
    if problem:
        raise ConfigError(f"--lengths {path} {problem}")
    try:
        if is_table:
            import pyarrow.parquet as pq  # noqa: PLC0415 - a plan without a file needs no pyarrow

            names = pq.read_schema(path).names
            wanted = [name for name in LENGTH_COLUMNS if name in names]
            rows: list[Any] = pq.read_table(path, columns=wanted).to_pylist()
            return rows
        # Not at the line separators of Unicode, which JSON has within its strings.
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--lengths {path}: cannot be read: {error}; it takes parquet (.parquet) or JSON lines"
        ) from error


def _lengths_of_row(path: Path, index: int, row: Any) -> tuple[int, int]:
    cells: list[Any] = [row.get(name) if isinstance(row, dict) else None for name in LENGTH_COLUMNS]
    for name, cell in zip(LENGTH_COLUMNS, cells, strict=True):
        if type(cell) is not int or not 1 <= cell <= MAX_LENGTH:
            raise ConfigError(
                f"--lengths {path}: row {index} has {name} {cell!r:.100}; each row needs whole "
                f"numbers from 1 to {MAX_LENGTH} in {' and '.join(LENGTH_COLUMNS)}"
            )
    return cells[0], cells[1]


def plan_as_json(
    plan: Plan, money: Money, num_nodes: int = 1, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Policy, memory in bytes and prediction of each node's plan, as JSON can hold them."""
    workload, job, predicted = plan.workload, plan.job, Prediction.of(plan, num_nodes)
    found: dict[str, Any] = {
        "model": plan.model_name,
        "hardware": plan.hardware.name,
        "num_rows": workload.num_rows,
        "prompt_tokens": workload.prompt_tokens,
        "shared_prompt_tokens": workload.shared_prompt_tokens,
        "generated_tokens": workload.generated_tokens if workload.generates else 0,
        "schedule": plan.schedule,
        "note": plan.note,
        "num_ranks": plan.num_ranks,
        "policy": asdict(plan.policy),
        "host_memory": dict(plan.footprint.parts),
        "device_memory": plan.device_footprint and dict(plan.device_footprint.parts),
        "bound": str(plan.bound),
        "prompt_bound": str(plan.prompt_bound),
        "prefill_tokens_per_s": plan.prefill_tokens_per_s,
        "decode_tokens_per_s": plan.decode_tokens_per_s,
        "tokens_per_s": plan.rate,
        "tokens_per_s_of": predicted.unit.removesuffix(" tokens/s"),
        "seconds": job.seconds,
        "loading_seconds": predicted.loading_s,
        "writing_seconds": predicted.writing_s,
        "num_steps": job.num_steps,
        "num_nodes": num_nodes,
        "fits_gpu": plan.schedule == "resident",
        "measured_share": plan.hardware.measured_share,
        "notes": [*notes],
    }
    price = money.price_per_hour
    if price is not None:
        found["currency"] = money.currency
        found["cost"] = predicted.cost(price, num_nodes)
        found["cost_per_million_tokens"] = predicted.cost_per_million(price, num_nodes)
    return found


SCHEDULES = ("auto", "in_place", "resident", *STREAMING_BUILDERS)

Model = Annotated[
    str,
    typer.Option(
        help="Plan for this model: a directory with a config.json, a name on the Hugging Face hub, "
        "a URI of a store, or a short name such as mixtral-8x7b; raymoe models lists those.",
        metavar="NAME|DIR|URI",
    ),
]
AdapterDirectory = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        help="Count what this LoRA adapter changes as it is held: quantised matrices decoded.",
        show_default=False,
        metavar="DIR",
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help=f"Plan for this node: {HERE} (this machine), a file that raymoe profile --out wrote, "
        f"a cloud instance such as g6.8xlarge, or one of {', '.join(HARDWARE_PRESETS)}. Without "
        "this option, instances are ranked by the cost of a token.",
        metavar="NAME|FILE",
    ),
]
PromptLen = Annotated[
    int, typer.Option(min=1, metavar="N", help="Plan for prompts of this many tokens on average.")
]
SharedLen = Annotated[
    int,
    typer.Option(
        "--shared-prompt-len",
        min=0,
        metavar="N",
        help="Let each prompt begin with this many tokens that earlier rows have too, so that they "
        "are computed only once.",
    ),
]
GenLen = Annotated[
    int, typer.Option(min=1, metavar="N", help="Plan for answers of this many tokens on average.")
]
NumRows = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help=f"Plan for this many rows; by default {DEFAULT_WORKLOAD.num_rows:,}, or as many as "
        "the file of --lengths has.",
    ),
]
Lengths = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Read the lengths of the rows from a file, parquet or JSON lines with the columns "
        f"{' and '.join(LENGTH_COLUMNS)}, instead of --prompt-len and --gen-len.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help=f"Plan for weights in this format instead of the model's own: {', '.join(WEIGHTS)}.",
        metavar="NAME",
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        help=f"Keep keys and values in this type, one of {', '.join(KV_DTYPES)}; auto is the "
        "type of --dtype. int8 is for nodes without a GPU, and rounds.",
        metavar="NAME",
    ),
]
StateDtype = Annotated[
    str,
    typer.Option(
        help=f"Keep states of linear attention in this type, one of {', '.join(STATE_DTYPES)}.",
        metavar="NAME",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help=f"Compute in this type, one of {', '.join(DTYPES)}; weights that are not quantised "
        "are kept in it too. auto is the type of the model.",
        metavar="NAME",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(metavar="N", help="Divide the rows among this many equal nodes; 1 by default."),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        metavar="HOURS",
        help="Find the smallest number of nodes on which the job ends within this many hours.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        metavar="PRICE",
        help="Take as many nodes as this many US dollars pay for, loading included, but no more "
        "than still compute for as long as they load.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")]
ScheduleName = Annotated[
    str,
    typer.Option(
        help="Use this order of weight copies, KV copies and kernels in a step, one of "
        f"{', '.join(SCHEDULES)}; auto takes the fastest.",
        metavar="NAME",
    ),
]
HostMemory = Annotated[
    int | None,
    typer.Option(
        parser=size,
        metavar="SIZE",
        help="Use at most this much host memory, such as 192GiB; by default what the node has.",
    ),
]
DeviceMemory = Annotated[
    int | None,
    typer.Option(
        parser=size, metavar="SIZE", help="Use at most this much memory of each GPU, such as 16GiB."
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Make room for rows of at most this many tokens, prompt and answer together; by "
        "default as many as the model allows.",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        min=1,
        max=MAX_RANKS,
        metavar="N",
        help="Divide every step among this many GPUs of the node; the plan shows the sizes of one.",
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        metavar="PRICE",
        help="Show what tokens and job cost if the node of --hardware costs this much an hour.",
    ),
]
Currency = Annotated[
    str,
    typer.Option(metavar="NAME", help="Name this currency with each cost."),
]
Task = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"Plan for this task, one of {', '.join(TASKS)}; all but generate only read prompts.",
    ),
]
Prices = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Rank the nodes of this JSON file, which maps an instance, one of the names of "
        "--hardware or a hardware file to US dollars for an hour; by default those that raymoe "
        "comes with.",
    ),
]
WhatIf = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="Show how much faster the job would be with more memory, a faster link, more cores or "
        "a faster GPU.",
    ),
]
Plot = Annotated[
    bool,
    typer.Option(
        "--plot", help="Draw the roofline of the node, and throughput over the size of host memory."
    ),
]
Out = Annotated[
    Path, typer.Option(metavar="DIR", help="Write the figures of --plot to this directory.")
]


def run(  # noqa: PLR0913 - the options of a command
    context: typer.Context,
    *,
    model: Model,
    adapter: AdapterDirectory = None,
    hardware: Hardware = None,
    prompt_len: PromptLen = DEFAULT_WORKLOAD.prompt_tokens,
    shared_prompt_len: SharedLen = 0,
    gen_len: GenLen = DEFAULT_WORKLOAD.generated_tokens,
    num_rows: NumRows = None,
    lengths: Lengths = None,
    task: Task = TASKS[0],
    weights: Weights = None,
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    state_dtype: StateDtype = "float32",
    schedule: ScheduleName = "auto",
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    max_context: MaxContext = None,
    tensor_parallel: TensorParallel = 1,
    price_per_hour: Price = None,
    currency: Currency = CURRENCY,
    prices: Prices = None,
    nodes: Nodes = None,
    deadline_hours: Deadline = None,
    budget: Budget = None,
    spot: Spot = False,
    write: Write = None,
    write_as: WriteAs = None,
    source: Source = DEFAULT_SOURCE,
    output: Output = DEFAULT_OUTPUT,
    what_if: WhatIf = False,
    plot: Plot = False,
    out: Out = Path("raymoe-plan"),
    as_json: AsJson = False,
) -> None:
    """Choose how to run a model on a node, and predict speed, time and cost of a job.

    Neither the weights nor the node are needed. Printed are the sizes of the plan, what needs
    which memory, what limits the speed, the time of the job and a few layers of a step. A model
    that does not fit is refused with the bytes that are missing. With --write, a file that runs
    the job on a cluster is written too.
    """
    _run(context.params, context.obj or sys.argv[2:])


def _run(given: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Plan with the options of the command.

    Args:
        arguments: Those it was called with.
    """
    _check_usage(given["hardware"], given["prices"], given)
    money = _money(given["price_per_hour"], given["currency"])
    wanted = WantedFile.of(given, arguments)
    workload = workload_of(given)
    fleet = _Fleet(workload, given["nodes"], given["deadline_hours"], given["budget"])
    node, name = None, given["hardware"]
    if name is not None:
        node = node_of(name, given["host_memory"], given["device_memory"])
        node = node if wanted is None else wanted.node(name, node)
    planner, node = planner_of(given, workload, node)
    if node is None:
        _rank(planner, fleet, given, wanted)
        return
    listed = read_prices()
    plan, count = _plan_on(planner, fleet, node, price_of(given, name, listed))
    notes = [*notes_of(plan, planner.model), *planner.fit_notes(node, plan)]
    (_print_json if given["as_json"] else _print)(plan, money, count, notes)
    if wanted is not None:
        wanted.write(plan, planner, num_nodes=count, name=name, prices=listed)
    more = given["what_if"], given["out"] if given["plot"] else None
    _show_more(plan, replace(planner, workload=plan.workload), *more)


def workload_of(given: Mapping[str, Any]) -> Workload:
    """The rows that the options of the command describe."""
    lengths = given["prompt_len"], given["gen_len"]
    workload = _workload(given["num_rows"], lengths, given["lengths"], given["shared_prompt_len"])
    return _of_task(workload, given["task"])


def planner_of(
    given: Mapping[str, Any], workload: Workload, node: HardwareSpec | None
) -> tuple[JobPlanner, HardwareSpec | None]:
    """The planner that the options of the command describe, and what one rank has of the node."""
    spec = _model(given["model"], given["adapter"], given["weights"], given["dtype"])
    spec = _with_state_dtype(spec, given["state_dtype"])
    schedule, max_context = given["schedule"], given["max_context"]
    _check(spec, node, workload, schedule=schedule, max_context=max_context)
    if node is not None:
        spec, node = of_one_rank(spec, node, given["tensor_parallel"])
    planner = JobPlanner(
        spec, workload, schedule=schedule, max_model_len=max_context,
        bytes_per_element=_item_bytes(spec.dtype or "bfloat16", "--dtype") or 2,
        kv_bytes_per_element=_kv_item_bytes(given["kv_dtype"], spec, node),
    )  # fmt: skip
    return planner, node


def _show_more(plan: Plan, planner: JobPlanner, what_if: bool, out: Path | None) -> None:
    if what_if:
        Console().print(_what_if_table(plan, planner))
    if out is not None:
        _write(_pictures(plan, planner), out)


@dataclass(frozen=True, slots=True)
class _Fleet:
    """How many nodes share the rows, or when they have to be done."""

    workload: Workload
    num_nodes: int | None
    deadline_hours: float | None
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and (self.num_nodes or self.deadline_hours) is not None:
            raise ConfigError("--budget chooses the number of nodes; leave out the others")
        check_number("--budget", self.budget, (0.01, MAX_PRICE), CURRENCY)
        if self.num_nodes is not None and self.deadline_hours is not None:
            raise ConfigError("--deadline-hours chooses the number of nodes; leave out --nodes")
        if self.num_nodes is not None and not 1 <= self.num_nodes <= MAX_NODES:
            raise ConfigError(
                f"--nodes is {self.num_nodes:,}; it takes a number from 1 to {MAX_NODES:,}"
            )
        check_number("--deadline-hours", self.deadline_hours, DEADLINE_HOURS, "hours")
        if (self.num_nodes or 1) > self.workload.num_rows:
            raise ConfigError(
                f"--nodes is {self.num_nodes:,}, and the job has {self.workload.num_rows:,} rows: "
                "a node needs at least one"
            )

    @property
    def deadline_s(self) -> float | None:
        return None if self.deadline_hours is None else 3600 * self.deadline_hours


def _money(price_per_hour: float | None, currency: str) -> Money:
    check_money(price_per_hour, currency)
    return Money(price_per_hour, currency)


def _of_task(workload: Workload, task: str) -> Workload:
    if task not in TASKS:
        raise UnknownOptionError(task, TASKS, "task")
    return workload if task == TASKS[0] else workload.without_generation()


def _plan_on(
    planner: JobPlanner, fleet: _Fleet, node: HardwareSpec, price: float | None
) -> tuple[Plan, int]:
    try:
        if fleet.budget is not None:
            if price is None:
                raise ConfigError(
                    f"--budget: the price of {node.name} is not known here; give --price-per-hour"
                )
            return plan_in_budget(planner, node, price, fleet.budget)
        return plan_in_time(planner, node, fleet.num_nodes or 1, fleet.deadline_s)
    except InfeasiblePlanError as error:
        pipeline = planner.pipeline(node)
        if pipeline is None:
            raise
        raise InfeasiblePlanError(f"{error}\n{pipeline.describe(node.name)}") from error


def _workload(
    num_rows: int | None, means: tuple[int, int], lengths: Path | None, shared_prompt_len: int
) -> Workload:
    if num_rows is not None and num_rows > MAX_ROWS:
        raise ConfigError(f"--num-rows is {str(num_rows)[:30]}...; it takes at most {MAX_ROWS:,}")
    if lengths is not None:
        workload = read_lengths(lengths, num_rows)
    else:
        num_rows = num_rows or DEFAULT_WORKLOAD.num_rows
        workload = Workload(num_rows=num_rows, prompt_tokens=means[0], generated_tokens=means[1])
    if shared_prompt_len >= workload.prompt_tokens:
        raise ConfigError(
            f"--shared-prompt-len is {shared_prompt_len}; it must be less than the mean length of "
            f"a prompt, which is {workload.prompt_tokens} tokens"
        )
    return replace(workload, shared_prompt_tokens=shared_prompt_len)


def _model(name: str, adapter: str | None, weights: str | None, dtype: str) -> ModelSpec:
    base, _, directory = base_and_adapter(name, adapter)
    model = model_by_name(str(base))
    if weights is not None:
        model = replace(model, quantization=quantization_of(weights), dtype="bfloat16")
    if directory is not None:
        # It loads torch, which other plans do not need.
        from raymoe.memory.adapters import Adapter  # noqa: PLC0415

        model = Adapter.open(directory, model).adapted(model)
    return model if dtype == "auto" else replace(model, dtype=dtype)


def _with_state_dtype(model: ModelSpec, state_dtype: str) -> ModelSpec:
    if state_dtype not in STATE_DTYPES:
        raise UnknownOptionError(state_dtype, STATE_DTYPES, "--state-dtype")
    if state_dtype != "float32" and not model.has_states:
        raise ConfigError(
            f"--state-dtype is {state_dtype}, but {model.name} has no linear attention; leave it "
            "out"
        )
    return model.with_state_dtype(state_dtype)


def _kv_item_bytes(kv_dtype: str, spec: ModelSpec, node: HardwareSpec | None) -> int | None:
    if kv_dtype not in KV_DTYPES:
        raise UnknownOptionError(kv_dtype, KV_DTYPES, "--kv-dtype")
    if kv_dtype == "int8":
        if node is None:
            raise ConfigError("--kv-dtype int8 needs a node without a GPU: name it with --hardware")
        if node.has_gpu:
            raise ConfigError(
                f"--kv-dtype int8 is read by the cores alone, and {node.name} has a GPU; leave it "
                "out, or name a node without one"
            )
        spec.check_int8_kv()
    return None if kv_dtype == "auto" else KV_ITEM_BYTES[kv_dtype]


def _item_bytes(dtype: str, option: str) -> int | None:
    if dtype not in DTYPES:
        raise UnknownOptionError(dtype, DTYPES, option)
    return None if dtype == "auto" else PLAIN_FORMATS[dtype].item_bytes


def node_of(name: str, host_memory: int | None, device_memory: int | None) -> HardwareSpec:
    """The node of --hardware with at most so many bytes of memory; None is what it has."""
    node = _this_machine() if name == HERE else find_hardware(name)
    if host_memory is not None:
        node = replace(node, host_memory_bytes=host_memory)
    if device_memory is not None:
        if not node.has_gpu:
            raise ConfigError(f"--device-memory: {node.name} has no GPU; leave it out")
        node = replace(node, gpu_memory_bytes=device_memory)
    return node


def _this_machine() -> HardwareSpec:
    # It loads torch, which no other plan needs.
    from raymoe.engine.node import this_node  # noqa: PLC0415

    return this_node()


def _check(
    model: ModelSpec,
    node: HardwareSpec | None,
    workload: Workload,
    *,
    schedule: str,
    max_context: int | None,
) -> None:
    if schedule not in SCHEDULES:
        raise UnknownOptionError(schedule, SCHEDULES, "schedule")
    if schedule not in {"auto", "in_place"} and node is not None and not node.has_gpu:
        raise ConfigError(f"--schedule {schedule}: {node.name} has no GPU; leave it out")
    longest = min(max_context or model.max_model_len, model.max_model_len)
    rows = workload.row_lengths or ((workload.prompt_tokens, workload.generated_tokens),)
    prompt, generated = max(rows, key=sum)
    if prompt + generated > longest:
        raise ConfigError(
            f"a row has {prompt} + {generated} tokens, and {longest:,} is the largest context "
            f"here; give shorter lengths, a larger --max-context (up to {model.max_model_len:,}) "
            "or another model"
        )


OF_ONE_NODE = ("host_memory", "device_memory", "plot", "price_per_hour", "what_if")


def _check_usage(hardware: str | None, prices: Path | None, given: Mapping[str, Any]) -> None:
    if hardware is not None and prices is not None:
        raise ConfigError(
            "--prices is for ranking instances; leave out --hardware, or give --price-per-hour"
        )
    of_one_node = {name: given[name] for name in OF_ONE_NODE}
    of_one_node["tensor_parallel"] = given["tensor_parallel"] > 1
    named = [f"--{key.replace('_', '-')}" for key, value in of_one_node.items() if value]
    if hardware is None and named:
        raise ConfigError(f"{', '.join(named)} needs one node; name it with --hardware")


def _rank(
    planner: JobPlanner, fleet: _Fleet, given: Mapping[str, Any], wanted: WantedFile | None
) -> None:
    prices = read_prices(given["prices"])
    with _planning_others():
        offers = rank(
            prices.prices, planner, num_nodes=fleet.num_nodes or 1, deadline_s=fleet.deadline_s,
            budget=fleet.budget, spot=given["spot"],
        )  # fmt: skip
        notes = [*ranking_notes(planner, offers)]
    if given["as_json"]:
        found = {
            "prices": {"source": prices.source, "date": prices.date, "currency": CURRENCY},
            "offers": [offer.to_json() for offer in offers],
            "notes": notes,
        }
        typer.echo(json.dumps(found, indent=2))
    else:
        _print_ranking(planner, fleet, offers, [f"Prices: {prices.origin}.", *notes])
    if wanted is not None:
        _write_for_best(planner, fleet, offers=offers, wanted=wanted, prices=prices)


def _print_ranking(
    planner: JobPlanner, fleet: _Fleet, offers: Sequence[Offer], notes: Sequence[str]
) -> None:
    console = Console()
    title = f"{fleet.num_nodes} nodes" if fleet.num_nodes else "one node"
    console.print(_title(planner.model.name, title, planner.workload), style="bold")
    console.print(ranking_table(offers))
    for note in notes:
        console.print(note)


def _write_for_best(
    planner: JobPlanner,
    fleet: _Fleet,
    *,
    offers: Sequence[Offer],
    wanted: WantedFile,
    prices: PriceList,
) -> None:
    best = offers[0]
    if best.plan is None:
        raise InfeasiblePlanError(
            f"--write: none of {len(offers)} nodes can run the job; {best.name}: {best.problem}"
        )
    plan, count, node = best.plan, best.num_nodes, find_hardware(best.name)
    of_job = wanted.node(best.name, node)
    if of_job != node:
        plan, count = _plan_on(planner, fleet, of_job, wanted.price(best.name, prices))
    wanted.write(plan, planner, num_nodes=count, name=best.name, prices=prices)


BOUNDS = {
    Resource.GPU: "GPU",
    Resource.CPU: "CPU",
    Resource.HTOD: "link in",
    Resource.DTOH: "link out",
    Resource.HOST_COPY: "staging",
}


def ranking_table(offers: Sequence[Offer]) -> Table:
    """Rates of all nodes of an offer together; readable with 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    has_nodes = any(offer.num_nodes > 1 for offer in offers)
    headers = ["instance", "$/h", "tokens/s", "band", "$/M", "spot", "hours"]
    headers += ["nodes"] if has_nodes else []
    for header in headers:
        table.add_column(header, justify="left" if header == "instance" else "right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for offer in offers:
        price = f"{offer.price.on_demand:.2f}"
        if offer.plan is None:
            table.add_row(offer.name, price, *["-"] * (len(headers) - 2), offer.label)
            continue
        plan, rate = offer.plan, offer.num_nodes * offer.plan.tokens_per_s
        band, spot = plan.hardware.measured_share, offer.spot_cost_per_million
        hint = "fits GPU" if plan.schedule == "resident" else BOUNDS[plan.bound]
        table.add_row(
            offer.name,
            price,
            f"{rate:,.0f}",
            "" if band is None else f"{band[0]}-{band[1]}",
            f"{offer.cost_per_million:.2f}",
            "" if spot is None else f"{spot:.2f}",
            f"{plan.job.seconds / 3600:,.1f}",
            *([f"{offer.num_nodes:,}"] if has_nodes else []),
            "CPU alone" if plan.note else hint,
        )
    return table


def _title(model: str, node: str, workload: Workload) -> str:
    return (
        f"{model} on {node}: {workload.num_rows:,} rows of {workload.prompt_tokens:,} + "
        f"{workload.generated_tokens:,} tokens"
    )


def _print_json(plan: Plan, money: Money, num_nodes: int, notes: Sequence[str]) -> None:
    typer.echo(json.dumps(plan_as_json(plan, money, num_nodes, notes), indent=2))


def _print(plan: Plan, money: Money, num_nodes: int, notes: Sequence[str]) -> None:
    console = Console()
    console.print(_title(plan.model_name, plan.hardware.name, plan.workload), style="bold")
    console.print(policy_table(plan))
    console.print(memory_table(plan))
    console.print(prediction_table(plan, money, num_nodes))
    for note in notes:
        console.print(note)
    console.print(Text(gantt(plan.decode, console.width)))


def _what_if_table(plan: Plan, plan_on: JobPlanner) -> Table:
    table = Table(title="what if")
    for column in ("more", "now", "then", "tokens/s", "gain", "bound"):
        table.add_column(column, justify="right" if column in {"tokens/s", "gain"} else "left")
    with _planning_others():
        plans = [(step, plan_on(step.hardware)) for step in next_steps(plan.hardware)]
    for step, then in plans:
        table.add_row(
            step.resource,
            step.before,
            step.after,
            f"{then.tokens_per_s:,.1f}",
            f"{100 * (then.tokens_per_s / plan.tokens_per_s - 1):+.0f} %",
            then.bound,
        )
    return table


def _pictures(plan: Plan, plan_on: JobPlanner) -> dict[str, str]:
    with _planning_others():
        pictures = {"throughput.svg": throughput_picture(plan, plan_on.model, plan_on)}
    if plan.steps.placement.streams:
        pictures["roofline.svg"] = roofline_picture(plan)
    return pictures


def _write(pictures: dict[str, str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        write_file(out / name, picture)
    Console(stderr=True).print(", ".join(str(out / name) for name in pictures), style="dim")


def _planning_others() -> Status:
    return Console(stderr=True).status("planning for other nodes")
