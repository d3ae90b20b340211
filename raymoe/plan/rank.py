"""Other nodes for a job: instances by cost, more of one resource, a pipeline of several nodes."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, inf
from pathlib import Path
from typing import Any, TypeVar

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.footprint import kv_block_bytes
from raymoe.plan.plan import Plan
from raymoe.plan.prediction import Prediction
from raymoe.plan.search import find_plan
from raymoe.plan.work import ModelWork
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.files import read_own_json
from raymoe.specs.hardware import (
    Curve,
    DeviceCurves,
    HardwareSpec,
    HostCurves,
    find_hardware,
)
from raymoe.specs.model import OVERFLOWS_IN_FLOAT16, ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import GB, GIB, TB, YEAR_S, ceil_div, format_bytes, format_seconds

PRICES_FILE = Path(__file__).parent.parent / "assets" / "prices.json"
MAX_NODES = 100_000
MAX_PRICE = 1e9


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars an hour."""

    on_demand: float
    spot: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """Prices by instance, preset or hardware file, and where they are from."""

    prices: Mapping[str, Price]
    source: str
    date: str = ""

    @property
    def origin(self) -> str:
        return f"{self.source} ({self.date})" if self.date else self.source


def read_prices(path: Path | None = None) -> PriceList:
    """Read a file of prices; None reads those of the package.

    It is an object with a price, or with {"on_demand": price, "spot": price or null}, by name; or
    such an object as "instances" next to "source" and "date".

    Raises:
        ConfigError: Unknown nodes and bad prices; names both.
    """
    file = path or PRICES_FILE
    found = read_own_json(file, what="--prices")
    entries = found.get("instances", found) if isinstance(found, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(
            f'--prices {file}: takes an object such as {{"g6.8xlarge": 2.01, '
            '"g5.8xlarge": {"on_demand": 2.45, "spot": 1.06}}'
        )
    prices = {name: _price(file, name, entry) for name, entry in entries.items()}
    source = found.get("source", str(file))
    return PriceList(prices=prices, source=str(source), date=str(found.get("date", "")))


def _price(file: Path, name: str, entry: object) -> Price:
    try:
        find_hardware(name)
    except ConfigError as error:
        raise ConfigError(f"--prices {file}: {error}") from error
    both: dict[str, Any] = entry if isinstance(entry, dict) else {"on_demand": entry}
    spot = both.get("spot")
    return Price(
        _dollars(file, name, both.get("on_demand")),
        None if spot is None else _dollars(file, name, spot),
    )


def _dollars(file: Path, name: str, price: object) -> float:
    if isinstance(price, int | float) and price is not True and 0 < price <= MAX_PRICE:
        return float(price)
    raise ConfigError(
        f"--prices {file}: {name} has the price {price!r:.40}; it takes a number above 0, in US "
        "dollars an hour"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A node, its price, and the plan of each of so many of them, or why there is none."""

    name: str
    price: Price
    plan: Plan | None = None
    num_nodes: int = 1
    problem: str = ""
    label: str = "too small"  # of the problem, in a table

    @property
    def cost_per_million(self) -> float:
        assert self.plan is not None, "a node that cannot run the job has no cost"
        return self.plan.cost_per_million_tokens(self.price.on_demand)

    @property
    def spot_cost_per_million(self) -> float | None:
        assert self.plan is not None, "a node that cannot run the job has no cost"
        spot = self.price.spot
        return None if spot is None else self.plan.cost_per_million_tokens(spot)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "node": self.name,
            "price_per_hour": self.price.on_demand,
            "spot_price_per_hour": self.price.spot,
        }
        if self.plan is None:
            return found | {"problem": self.problem}
        plan = self.plan
        return found | {
            "cost_per_million_tokens": self.cost_per_million,
            "spot_cost_per_million_tokens": self.spot_cost_per_million,
            "cost": self.num_nodes * self.price.on_demand * plan.job.seconds / 3600,
            "num_nodes": self.num_nodes,
            "tokens_per_s": self.num_nodes * plan.tokens_per_s,
            "seconds": plan.job.seconds,
            "schedule": plan.schedule,
            "bound": str(plan.bound),
            "measured_share": plan.hardware.measured_share,
        }


PlanWith = Callable[[HardwareSpec, int], Plan]
"""Plans the share of one of so many equal nodes."""


@dataclass(frozen=True)
class JobPlanner:
    """Plans one job of one model on any node; element sizes are those of `find_plan`."""

    model: ModelSpec
    workload: Workload
    schedule: str = "auto"
    max_model_len: int | None = None
    bytes_per_element: int = 2
    kv_bytes_per_element: int | None = None

    def __call__(self, node: HardwareSpec, num_nodes: int = 1) -> Plan:
        """The plan of one of so many equal nodes."""
        return self._find(self.model, node, self.workload.share(num_nodes), self.schedule)

    def pipeline(self, node: HardwareSpec) -> "Pipeline | None":
        """GPUs of such nodes that hold the model together; None without a GPU, or for a rank."""
        if not node.has_gpu or self.model.num_shards > 1:
            return None
        return find_pipeline(
            self.model,
            node,
            lambda stage: self._find(stage, node, self.workload, "resident"),
            self.bytes_per_element,
        )

    def fit_notes(self, node: HardwareSpec, plan: Plan) -> Iterator[str]:
        """What would keep all weights on GPUs, where `plan` does not."""
        if plan.schedule == "resident" or not node.has_gpu:
            return
        if self.is_crowded_out(node):
            yield (
                f"The weights fit the GPU of {node.name}, but not beside the KV cache of a row of "
                f"{self._max_model_len:,} tokens: give the longest row with --max-context."
            )
            return
        pipeline = self.pipeline(node)
        if pipeline is not None:
            yield pipeline.describe(node.name, plan.tokens_per_s)

    def is_crowded_out(self, node: HardwareSpec) -> bool:
        """Whether the GPU has room for all weights, but not for the longest row as well."""
        free = node.gpu_memory_bytes - self.model.weight_bytes(self.bytes_per_element)
        work = ModelWork.of(
            self.model, self.bytes_per_element, kv_element_bytes=self.kv_bytes_per_element
        )
        blocks = ceil_div(self._max_model_len, KV_BLOCK_TOKENS)
        return 0 < free < blocks * kv_block_bytes(work)

    @property
    def _max_model_len(self) -> int:
        return min(self.max_model_len or self.model.max_model_len, self.model.max_model_len)

    def _find(
        self, model: ModelSpec, node: HardwareSpec, workload: Workload, schedule: str
    ) -> Plan:
        return find_plan(
            model, node, workload, schedule=schedule, max_model_len=self.max_model_len,
            bytes_per_element=self.bytes_per_element,
            kv_bytes_per_element=self.kv_bytes_per_element,
        )  # fmt: skip


class TooLateError(InfeasiblePlanError):
    """No number of nodes ends the job before its deadline."""


def plan_in_time(
    plan_with: PlanWith, node: HardwareSpec, num_nodes: int, deadline_s: float | None
) -> tuple[Plan, int]:
    """The plan of each of `num_nodes`, or of the fewest nodes that end before the deadline.

    Raises:
        ConfigError: A deadline that is not positive.
        InfeasiblePlanError: A node cannot run the job.
        TooLateError: Not even one row each is in time, or it takes more than `MAX_NODES`.
    """
    if deadline_s is not None and not 0 < deadline_s < inf:
        raise ConfigError(f"the deadline is {deadline_s!r} s; it takes a positive number")
    plan, count = plan_with(node, num_nodes), num_nodes
    one_s, num_rows = plan.job.seconds, num_nodes * plan.workload.num_rows
    while deadline_s is not None and plan.job.seconds > deadline_s:
        if plan.workload.num_rows == 1:
            raise TooLateError(
                f"one row takes {format_seconds(plan.job.seconds)} on {node.name}, however many "
                f"nodes there are; the deadline is {format_seconds(deadline_s)}"
            )
        count = min(num_rows, max(count + 1, ceil(count * plan.job.seconds / deadline_s)))
        if count > MAX_NODES:
            raise TooLateError(
                f"to end in {format_seconds(deadline_s)}, the job needs {count:,} nodes of "
                f"{node.name} or more, and takes {format_seconds(one_s)} on {num_nodes:,}: give a "
                f"later deadline; jobs are planned for at most {MAX_NODES:,} nodes"
            )
        plan = plan_with(node, count)
    return plan, count


class OverBudgetError(InfeasiblePlanError):
    """One node already costs more than may be spent."""


def plan_in_budget(
    plan_with: PlanWith, node: HardwareSpec, price_per_hour: float, budget: float
) -> tuple[Plan, int]:
    """The plan of each of as many nodes as a budget pays for, and their number.

    More nodes end earlier and cost more, as each of them loads the model. There are at most so many
    that each still computes for as long as it loads.

    Args:
        price_per_hour: Of a node.
        budget: What loading and computing may cost, in the same currency.

    Raises:
        OverBudgetError: One node costs more.
        InfeasiblePlanError: A node cannot run the job.
    """
    plan = plan_with(node, 1)
    one, num_rows = Prediction.of(plan), plan.workload.num_rows
    cost = one.rent(price_per_hour)
    if cost > budget:
        raise OverBudgetError(
            f"the job costs {cost:,.2f} on one {node.name} at {price_per_hour:g} an hour, and the "
            f"budget is {budget:,.2f}: give more, or take fewer rows or a cheaper node"
        )
    paid = (3600 * budget / price_per_hour - one.running_s) / one.loading_s
    count = max(1, int(min(paid, one.running_s / one.loading_s, num_rows, MAX_NODES)))
    while count > 1:
        plan = plan_with(node, count)
        cost = Prediction.of(plan, count).rent(price_per_hour, count)
        if cost <= budget:
            return plan, count
        count = min(count - 1, int(count * budget / cost))
    return plan_with(node, 1), 1


LABELS = {TooLateError: "too late", OverBudgetError: "over budget"}


def rank(
    prices: Mapping[str, Price],
    planner: JobPlanner,
    *,
    num_nodes: int = 1,
    deadline_s: float | None = None,
    budget: float | None = None,
    spot: bool = False,
) -> list[Offer]:
    """Plan the job for each node: the cheapest for a token first, those that fail last.

    Args:
        budget: Take as many nodes as it pays for, in US dollars, instead of `num_nodes`.
        spot: Take spot prices for the budget and the order; nodes without one fail.
    """
    offers = []
    for name, price in prices.items():
        hourly = price.spot if spot else price.on_demand
        if hourly is None:
            problem = "its spot price is not known"
            offers.append(Offer(name=name, price=price, problem=problem, label="no spot price"))
            continue
        node = find_hardware(name)
        if not node.has_bfloat16 and planner.model.model_type in OVERFLOWS_IN_FLOAT16:
            problem = "no products of bfloat16, and the model overflows in float16"
            offers.append(Offer(name=name, price=price, problem=problem, label="no bfloat16"))
            continue
        try:
            if budget is None:
                plan, count = plan_in_time(planner, node, num_nodes, deadline_s)
            else:
                plan, count = plan_in_budget(planner, node, hourly, budget)
            offers.append(Offer(name=name, price=price, plan=plan, num_nodes=count))
        except InfeasiblePlanError as error:
            problem = str(error).splitlines()[0].rstrip(":")
            label = LABELS.get(type(error), "too small")
            offers.append(Offer(name=name, price=price, problem=problem, label=label))
    feasible = sorted(
        (each for each in offers if each.plan),
        key=lambda each: (spot and each.spot_cost_per_million) or each.cost_per_million,
    )
    return feasible + [each for each in offers if each.plan is None]


MAX_STAGES = 64
MORE_STAGES = 1.5  # what is tried next to the fewest: more GPUs hold more rows


@dataclass(frozen=True, slots=True)
class Pipeline:
    """So many GPUs that hold all weights, each a part of the layers."""

    num_gpus: int
    tokens_per_s: float

    def describe(self, node: str, streamed_tokens_per_s: float | None = None) -> str:
        has_several = re.search(r"\((?!1 x)\d+ x", node) is not None
        text = (
            f"{self.num_gpus} {'GPUs of' if has_several else 'x'} {node} hold the model in a "
            f"pipeline, with vLLM or SGLang: about {self.tokens_per_s:,.0f} tokens/s"
        )
        if streamed_tokens_per_s is None or has_several:
            return f"{text}."
        ratio = self.tokens_per_s / self.num_gpus / streamed_tokens_per_s
        return f"{text}, {ratio:.1f} times the rate of as many nodes with raymoe."


def find_pipeline(
    model: ModelSpec,
    node: HardwareSpec,
    plan_stage: Callable[[ModelSpec], Plan],
    bytes_per_element: int,
) -> Pipeline | None:
    """The pipeline with the best rate for a GPU; `plan_stage` plans resident weights.

    As many batches are on the way as there are stages, so a stage has the KV of all and computes
    with one of them at a time. Copies between nodes are not counted.
    """
    num_layers, found = model.num_layers, list[Pipeline]()
    num_gpus = max(2, ceil_div(model.weight_bytes(bytes_per_element), node.gpu_memory_bytes))
    while num_gpus <= min(num_layers, MAX_STAGES) and len(found) < 2:
        # The last layers: leading ones may be dense and small.
        stage = replace(model, layers=model.layers[-ceil_div(num_layers, num_gpus) :])
        try:
            plan = plan_stage(stage)
        except InfeasiblePlanError:
            num_gpus += 1
            continue
        rows = max(1, plan.policy.max_num_seqs // num_gpus)
        job = plan.estimate(plan.workload, replace(plan.policy, max_num_seqs=rows))
        found.append(Pipeline(num_gpus, job.tokens_per_s))
        num_gpus = ceil(MORE_STAGES * num_gpus)
    return max(found, key=lambda each: each.tokens_per_s / each.num_gpus, default=None)


def notes_of(plan: Plan, model: ModelSpec) -> Iterator[str]:
    """What a buyer should know of a plan, in sentences."""
    node = plan.hardware
    if plan.schedule == "resident":
        yield (
            "The model fits on this GPU: do not offload. The plan keeps all of it there, and vLLM "
            "or SGLang do such a job as well."
        )
    if node.is_estimate and node.measured_share is not None:
        low, high = node.measured_share
        yield (
            f"The rates of {node.name} are estimates: on this GPU, MoE-Lightning measured {low} to "
            f"{high} of such a prediction, here {low * plan.tokens_per_s:,.1f} to "
            f"{high * plan.tokens_per_s:,.1f} tokens/s."
        )
    elif node.is_estimate:
        yield (
            f"The rates of {node.name} are estimates that no measurement has confirmed; `raymoe "
            "profile` measures a node."
        )
    yield from _dtype_notes(model, node)
    if plan.job.seconds > 1000 * YEAR_S:
        yield (
            "This job is out of reach: take fewer rows, more nodes (--nodes) or a smaller model."
        )


def _dtype_notes(model: ModelSpec, node: HardwareSpec) -> Iterator[str]:
    if node.has_bfloat16 or (model.dtype or "bfloat16") != "bfloat16":
        return
    if model.model_type in OVERFLOWS_IN_FLOAT16:
        yield (
            f"{node.name} has no products of bfloat16, and hidden states of {model.model_type} "
            "overflow in float16: raymoe refuses this model there except in float32, which is slow."
        )
    else:
        yield (
            f"{node.name} has no products of bfloat16: raymoe computes in float16 there, whose "
            "largest number is 65,504."
        )


def ranking_notes(planner: JobPlanner, offers: Sequence[Offer]) -> Iterator[str]:
    """What a buyer should know of a ranking, in sentences."""
    plans = [offer.plan for offer in offers if offer.plan is not None]
    if any(plan.schedule == "resident" for plan in plans):
        yield (
            "Where it fits the GPU, do not offload: raymoe keeps all of it there, and vLLM or "
            "SGLang do such a job as well."
        )
    if any(plan.hardware.is_estimate for plan in plans):
        yield (
            "Rates of these nodes are estimates. Where there is a band, MoE-Lightning measured "
            "so much of such a prediction on this GPU; nothing has confirmed the others."
        )
    old = [offer.name for offer in offers if offer.plan and not offer.plan.hardware.has_bfloat16]
    if old and planner.model.dtype in {None, "bfloat16"}:
        yield f"No products of bfloat16: {', '.join(old)} compute in float16."
    streamed = [offer for offer in offers if offer.plan and offer.plan.schedule != "resident"]
    crowded = [each.name for each in streamed if planner.is_crowded_out(find_hardware(each.name))]
    if crowded:
        yield (
            f"The weights fit the GPUs of {', '.join(crowded)}, but not beside the KV cache of the "
            "longest row that the model allows: give that of the job with --max-context."
        )
    nodes = [find_hardware(offer.name) for offer in offers[: 1 if plans else None]]
    for node in {node.gpu_memory_bytes: node for node in reversed(nodes)}.values():
        if not plans:
            pipeline = planner.pipeline(node)
            yield from [] if pipeline is None else [pipeline.describe(node.name)]
        else:
            yield from planner.fit_notes(node, plans[0])


MORE_DEVICE_BYTES = 8 * GIB
HOST_MEMORY_FACTOR = 1.5
RATE_FACTOR = 2

Rates = TypeVar("Rates", HardwareSpec, HostCurves, DeviceCurves)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreOfOne:
    """A node that has more of one thing.

    Attributes:
        resource: What there is more of.
        before: How much of it the node has.
        after: How much it would have.
    """

    resource: str
    before: str
    after: str
    hardware: HardwareSpec


def next_steps(node: HardwareSpec) -> Iterator[MoreOfOne]:
    """One step of each resource; those of the GPU and its link only where there is one."""
    host_memory = int(HOST_MEMORY_FACTOR * node.host_memory_bytes)
    if node.has_gpu:
        device_memory = node.gpu_memory_bytes + MORE_DEVICE_BYTES
        more = replace(node, gpu_memory_bytes=device_memory)
        yield _step("GPU memory", node, more, _device_memory)
    yield _step("host memory", node, replace(node, host_memory_bytes=host_memory), _host_memory)
    if node.has_gpu:
        yield _step("link", node, _with_faster_link(node), _link)
    yield _step("cores", node, _with_faster_host(node), _host)
    if node.has_gpu:
        yield _step("GPU rate", node, _with_faster_gpu(node), _gpu)


def _step(
    resource: str, node: HardwareSpec, more: HardwareSpec, describe: Callable[[HardwareSpec], str]
) -> MoreOfOne:
    return MoreOfOne(resource=resource, before=describe(node), after=describe(more), hardware=more)


def _with_faster_link(node: HardwareSpec) -> HardwareSpec:
    curves = node.device_curves
    if curves is not None:
        names = [field.name for field in fields(curves) if "htod" in field.name]
        names += [field.name for field in fields(curves) if "dtoh" in field.name]
        curves = _faster(curves, *names)
    return replace(_faster(node, "htod_bytes_per_s", "dtoh_bytes_per_s"), device_curves=curves)


def _with_faster_host(node: HardwareSpec) -> HardwareSpec:
    host, device = node.host_curves, node.device_curves
    if host is not None:
        host = _faster(host, *(field.name for field in fields(host)))
    if device is not None:
        device = _faster(device, "busy_attention_bytes_per_s")
    names = ("num_cores", "host_bytes_per_s", "host_flop_per_s", "host_copy_bytes_per_s")
    return replace(_faster(node, *names), host_curves=host, device_curves=device)


def _with_faster_gpu(node: HardwareSpec) -> HardwareSpec:
    curves = node.device_curves
    if curves is not None:
        of_link_and_host = ("htod", "dtoh", "busy_attention")
        names = [
            field.name
            for field in fields(curves)
            if not any(other in field.name for other in of_link_and_host)
            and getattr(curves, field.name) is not None
        ]
        curves = _faster(curves, *names)
    return replace(_faster(node, "gpu_flop_per_s", "gpu_bytes_per_s"), device_curves=curves)


def _faster(rates: Rates, *names: str) -> Rates:
    changes: dict[str, Any] = {}
    for name in names:
        value = getattr(rates, name)
        is_curve = isinstance(value, Curve)
        changes[name] = value.scaled(RATE_FACTOR) if is_curve else RATE_FACTOR * value
    return replace(rates, **changes)


def _device_memory(node: HardwareSpec) -> str:
    return format_bytes(node.gpu_memory_bytes)


def _host_memory(node: HardwareSpec) -> str:
    return format_bytes(node.host_memory_bytes)


def _link(node: HardwareSpec) -> str:
    return f"{node.htod_bytes_per_s / GB:.1f} GB/s"


def _host(node: HardwareSpec) -> str:
    return f"{node.num_cores} with {node.host_bytes_per_s / GB:.0f} GB/s"


def _gpu(node: HardwareSpec) -> str:
    return f"{node.gpu_flop_per_s / TB:.0f} TFLOP/s"
