"""Settings of Ray Data, and the arguments of `map_batches` that fit a model and a cluster."""

import bisect
import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raymoe.config import (
    AUTO,
    EngineConfig,
    NumActors,
    as_engine_config,
    as_sampling_params,
    with_base,
)
from raymoe.data.before_start import check_rows, is_generator
from raymoe.data.callbacks import register_callbacks
from raymoe.data.cluster import Cluster, check_before_start
from raymoe.data.generator import check_options
from raymoe.data.kinds import (
    LATER,
    KindPlan,
    common_cpus,
    kinds_that_pay,
    plan_kinds,
    predict,
    show_nodes,
    without_nodes,
)
from raymoe.data.model_files import fetch_for_plan
from raymoe.data.node_share import choose_sharing, dtype_of, read_model, saved_bytes, share_node
from raymoe.data.nodes import Node
from raymoe.data.remote_args import NAMES, RemoteArgs, take_remote_args
from raymoe.data.rollouts import CALLS_PER_ROW
from raymoe.data.tasks import read_task_of, reader_of
from raymoe.data.workload import describe, find_workload, resized
from raymoe.download.models import find_files
from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.output_schema import OutputSchema
from raymoe.plan.plan import RESOURCE_NAMES, Plan
from raymoe.plan.prediction import Prediction
from raymoe.plan.search import find_plan
from raymoe.shadows import directories_of_workers, find_shadow
from raymoe.specs.files import expanded
from raymoe.specs.hardware import HardwareSpec, MeasuredNode, find_hardware, is_hardware_file
from raymoe.specs.weight_format import KV_ITEM_BYTES, PLAIN_FORMATS
from raymoe.specs.workload import Workload
from raymoe.units import CURRENCY, ceil_div, format_bytes, format_seconds

if TYPE_CHECKING:
    from ray.data import DataContext, Dataset

# A notebook shows INFO of Ray Data's loggers, and of no others.
notebook_logger = logging.getLogger("ray.data.raymoe")

NO_PROGRESS_TIMEOUT_S = 6 * 3600  # one slow micro-batch or a large load moves no block


def configure_data_context(
    *,
    id_column: str | None = None,
    checkpoint_path: str | Path | None = None,
    preserve_order: bool = False,
    no_progress_timeout_s: float = NO_PROGRESS_TIMEOUT_S,
    context: "DataContext | None" = None,
) -> "DataContext":
    """Configure Ray Data for long steps; call it before the dataset is made.

    Generators of such datasets are checked before they start, watched, and count their equal rows.
    Without it Ray Data ends a job in which no block moved for half an hour, as happens while large
    weights load or few long rows are left; and each of the hundreds of tasks of an actor has a
    thread that reads the memory of their common process every second.

    With a checkpoint path, Ray Data records the ids of every file it has written there, and a
    restarted job skips those rows. The dataset must come from files, go through maps alone and be
    written to files; ids must be unique and kept up to the end. Reading them back needs an actor
    with one CPU and 1 GiB of `memory` in addition to those of the job.

    Args:
        checkpoint_path: A directory that all nodes reach, or an address of object storage.
        preserve_order: Rows come out in the order of the input; the rows of a node that dies then
            delay all that follow them.
        no_progress_timeout_s: Longest time in which no block moves; `math.inf` for no limit.
        context: That of this process by default.

    Raises:
        ConfigError: A checkpoint without a column of ids, or a limit that is not positive.
    """
    # Ray is slow to import, and planning does not need it.
    from ray.data import DataContext  # noqa: PLC0415
    from ray.data.checkpoint import CheckpointConfig  # noqa: PLC0415

    if not no_progress_timeout_s > 0:
        raise ConfigError(
            f"no_progress_timeout_s is {no_progress_timeout_s!r}; it must be positive, or math.inf"
        )
    if checkpoint_path is not None and id_column is None:
        raise ConfigError(
            f"checkpoint_path is {str(checkpoint_path)!r}, but id_column is missing: a checkpoint "
            "knows rows by their ids"
        )
    context = context or DataContext.get_current()
    never = -1
    context.execution_no_progress_timeout_s = (
        never if math.isinf(no_progress_timeout_s) else no_progress_timeout_s
    )
    context.execution_options.preserve_order = preserve_order
    context.memory_usage_poll_interval_s = (
        None  # the thread of each task would measure the same process
    )
    register_callbacks(context)
    if checkpoint_path is not None:
        context.checkpoint_config = CheckpointConfig(
            id_column=id_column, checkpoint_path=str(checkpoint_path)
        )
    return context


try:
    from ray.data import ActorPoolStrategy
    from ray.data import DataContext as CurrentContext
except ImportError as error:
    raise ImportError(
        "raymoe.map_batches_kwargs needs Ray Data: pip install 'ray[data]>=2.60,<2.64'"
    ) from error

MAX_CONCURRENT_CALLS = 256  # per actor; with more, Ray Data loses more in dispatch than it gains
MAX_CALLS_OF_A_JOB = 8192  # per job; the driver starts some 50 a second and monitors all of them
MIN_CALLS = 16  # per actor; with fewer, many finished rows wait for the slowest row of their call
DEFAULT_ROWS = 1024
# A call holds its finished rows until its slowest is done, so more rows must be in flight than
# sequences live: by the ratio of the longest row of a call to the mean. Twice keeps a batch full if
# lengths vary by half; with lengths like those of answers that end by themselves it would be 0.6
# full.
ROWS_PER_SEQUENCE = 4
MIN_ROWS_PER_CALL = 16  # a task costs the driver some milliseconds, however few its rows are
DIRECTORIES = ("journal_dir", "status_dir")
PREFETCHED_FRACTION = 0.25  # tasks that wait at the actor with their input already local


def map_batches_kwargs(  # noqa: PLR0913 - the options of a user, all keyword-only
    model_source: str | Path,
    *,
    num_actors: NumActors = AUTO,
    min_actors: int | None = None,
    num_generators: int | None = None,
    rows_in_flight: int | None = None,
    batch_size: int | None = None,
    num_gpus: float | None = None,
    num_cpus: float | None = None,
    memory: int | None = None,
    engine_config: EngineConfig | Mapping[str, Any] | None = None,
    ds: "Dataset | None" = None,
    workload: Workload | None = None,
    **options: Any,
) -> "OperatorKwargs":
    """Return the keyword arguments with which `Dataset.map_batches` runs `MoEGenerator`.

    Their attribute `plan` is the plan of the job, which Ray Data's logger shows. Blocks of another
    size than `batch_size` run their calls one after another.

    Args:
        model_source: A model directory, a name on the Hugging Face hub, or a URI (``s3://``).
        num_actors: Engines; "auto": one per GPU (per `tensor_parallel_size`), or per node without
            any, fewer if more hardly help. Those on GPUs of one node may share its weights.
        min_actors: With fewer than `num_actors`, Ray starts the others if rows wait for them.
        num_generators: Generators of the pipeline; each plans with its part of a node.
        rows_in_flight: Per actor; None chooses four times the sequences that the plan keeps live.
        batch_size: Rows of one call; None chooses 16, or as many as `rows_in_flight` needs.
        num_gpus: Per actor; None chooses `tensor_parallel_size` if there are GPUs to use.
        num_cpus: Reserved for an actor; None leaves one of a node to reads.
        memory: Bytes reserved for an actor; None chooses what the plan needs.
        ds: The dataset, to plan for its rows and their lengths; `workload` replaces it.
        options: Of `MoEGenerator`, directories from here; calls_per_row, how often a `rollout` asks
            the model on average; and of actors as Ray names them, of which only nodes count that
            meet them: label_selector, fallback_strategy, accelerator_type, resources,
            scheduling_strategy, runtime_env, and ray_remote_args for others.
    """
    counts = {"num_generators": num_generators, "min_actors": min_actors}
    _check_counts(num_actors, rows_in_flight=rows_in_flight, batch_size=batch_size, **counts)
    remote_args = take_remote_args(options)
    _check_options(model_source, {**options, "engine_config": engine_config}, ds, remote_args)
    model_source, config = with_base(model_source, _with_hardware(as_engine_config(engine_config)))
    workload = config.workload or _find_workload(workload, ds, model_source, options)
    cluster = _find_cluster(config, num_gpus, num_generators, ds, remote_args=remote_args)
    found = pool, config, _, job, *_ = _plan_pool(
        model_source, config, workload, cluster, num_actors=num_actors,
        min_actors=min_actors, batch_size=batch_size)  # fmt: skip
    batch_size, calls = _choose_sizes(rows_in_flight or _default_rows(found), batch_size, pool[1])
    calls = min(calls, rows_in_flight or _calls_of_a_share(workload, options, pool, batch_size))
    job = _with_tasks(job, rows_in_flight, batch_size)
    _show(workload, found, cluster)
    engine = {"engine_config": _handed_down(config, job), "max_concurrent_calls": calls}
    return OperatorKwargs({
        "batch_size": batch_size, "batch_format": "pyarrow", "udf_modifying_row_count": False,
        "num_gpus": _choose_num_gpus(num_gpus, config, cluster),
        "fn_constructor_args": (str(model_source),),
        "fn_constructor_kwargs": OperatorKwargs(engine | _for_nodes(options), job),
        "compute": _make_pool(*pool, calls),
    } | _request(found, num_cpus, memory, remote_args), job)  # fmt: skip


def _request(
    found: "PoolPlan", num_cpus: float | None, memory: int | None, remote_args: RemoteArgs
) -> dict[str, Any]:
    """Return what an actor asks for, and where."""
    num_cpus = found.num_cpus if num_cpus is None else num_cpus
    if memory is None and found.actor is not None:
        memory = found.actor.memory_bytes
    remote_args = without_nodes(remote_args, found.left_out, num_cpus, memory or 0)
    return {"num_cpus": num_cpus, "memory": memory, **remote_args}


POOL_OPTIONS = frozenset(inspect.signature(map_batches_kwargs).parameters) | NAMES | {CALLS_PER_ROW}


def _show(workload: Workload | None, found: "PoolPlan", cluster: Cluster) -> None:
    if workload is not None and found.job is not None:
        notebook_logger.info("%s", found.job)
        return
    places = found.places or _places(found.pool[1], cluster.max_actors, cluster)
    if cluster.max_actors > 1 or len(places) > 1:
        notebook_logger.info("%s", "; ".join(places))


def _places(num_actors: int, max_actors: int, cluster: Cluster, *, few: bool = False) -> list[str]:
    """Return how much of the cluster the actors use.

    Args:
        few: Whether fewer than could run were chosen.
    """
    why = ": more would hardly end the job sooner" if few else ""
    found = [f"actors: {num_actors}, with room for {max_actors}{why}"]
    if cluster.num_to_come:
        found.append(f"{cluster.num_to_come} of {cluster.num_nodes} nodes do not run yet: the "
                     "autoscaler starts them as actors need them")  # fmt: skip
    return [*found, *cluster.idle]


def _check_options(
    model_source: str | Path,
    options: Mapping[str, Any],
    ds: "Dataset | None",
    remote_args: RemoteArgs,
) -> None:
    shadow = find_shadow(directories_of_workers())
    if shadow is not None:
        raise ConfigError(shadow)
    check_options(model_source, options, POOL_OPTIONS)
    fetch_for_plan(model_source, runtime_env=remote_args.get("runtime_env"))
    check_options(model_source, options, POOL_OPTIONS)  # again: more is known of the model now
    if ds is not None:
        register_callbacks(ds.context)
        check_rows(ds._logical_plan.dag, model_source, options)  # noqa: SLF001 - as in `find_workload`
    check_before_start()


class OperatorKwargs(dict[str, Any]):
    """Keyword arguments of `map_batches`, and of the operator's constructor among them.

    Attributes:
        plan: None if model or nodes are not known here. `CheckFit` compares it, in the arguments of
            a stage, with the actors that run.
    """

    def __init__(self, kwargs: Mapping[str, Any], plan: "JobPlan | None" = None) -> None:
        super().__init__(kwargs)
        self.plan = plan


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The plan of each actor, for its part of the job's rows.

    Attributes:
        num_actors: Actors that share the rows; of a range the fewest.
        max_actors: The most of a range; None without one.
        is_typical: Whether the rates are those of a typical core, as nobody measured the nodes.
        rates: What was measured on this machine, where the actors run; None if they run elsewhere.
        places: Sentences on how much of the cluster the actors use; none where somebody chose.
        kinds: The engines on each kind of node, the fastest first, where nodes differ. `plan` is
            then that of the first.
        workload: All rows of the job; None where `plan` has a part like all others.
    """

    plan: Plan
    num_actors: int
    max_actors: int | None = None
    num_nodes: int
    is_typical: bool
    rates: MeasuredNode | None = None
    places: tuple[str, ...] = ()
    kinds: tuple[KindPlan, ...] = ()
    workload: Workload | None = None

    @property
    def prediction(self) -> Prediction:
        """What the job takes; the same that `raymoe plan` says of such nodes and rows."""
        return predict(self.kinds) if self.kinds else Prediction.of(self.plan, self.num_actors)

    def seconds_with(self, num_actors: int) -> float:
        """Return what the job takes after loading when so many actors share its rows."""
        return self.plan.job.seconds * self.num_actors / num_actors

    def cost(self, price_per_hour: float) -> float:
        """Cost of the job, with the price of a node."""
        return self.prediction.cost(price_per_hour, self.num_nodes)

    def describe(self, price_per_hour: float | None = None, currency: str = CURRENCY) -> str:
        plan, found = self.plan, self.prediction
        predicted = f"  predicted: {found.parts}; {found.speed}, {self._bound}{self._note()}"
        lines = [*(self._of_unlike_nodes() if self.kinds else self._of_like_nodes()), predicted]
        if plan.note:
            lines.insert(-1, f"  {plan.note}")
        if price_per_hour is not None:
            lines.append(f"  cost: {found.cost_text(price_per_hour, currency, self.num_nodes)}")
        if self.max_actors is not None:
            seconds = self.seconds_with(self.max_actors)
            lines.append(f"  with {self.max_actors} actors the job takes {format_seconds(seconds)}")
        lines += [f"  {sentence}" for sentence in self.places]
        return "\n".join(lines)

    def _of_like_nodes(self) -> list[str]:
        plan = self.plan
        of_each = f", on each of {self.num_actors} actors" if self.num_actors > 1 else ""
        return [
            f"plan: {describe(plan.workload)}{of_each}",
            f"  on {plan.hardware.name}: up to {plan.policy.max_num_seqs:,} sequences and "
            f"{plan.policy.max_num_batched_tokens:,} tokens in a step, schedule {plan.schedule}, "
            f"{format_bytes(plan.host_bytes)} of host memory",
        ]

    def _of_unlike_nodes(self) -> list[str]:
        shared = "" if self.workload is None else f"{describe(self.workload)}, "
        head = f"plan: {shared}shared by speed by {self.num_actors} actors on unlike nodes"
        return [head, *(f"  {kind.describe(self.workload)}" for kind in self.kinds)]

    @property
    def _bound(self) -> str:
        what = "decoding" if self.plan.workload.generates else "reading"
        return f"{what} is bound by {RESOURCE_NAMES[self.plan.job_bound]}"

    def _note(self) -> str:
        if not self.is_typical:
            return ""
        return " (with the speed of a typical core; raymoe profile measures this machine)"

    def __str__(self) -> str:
        return self.describe()


def plan_job(
    model_source: str | Path,
    config: EngineConfig,
    workload: Workload,
    cluster: Cluster,
    *,
    num_actors: NumActors,
) -> JobPlan | None:
    """Return the plan of a job on a cluster, as its driver will make it; None if it does not fit.

    Args:
        model_source: A local directory.
    """
    config = _with_hardware(config)
    return _plan_pool(model_source, config, workload, cluster, num_actors=num_actors).job


class PoolPlan(NamedTuple):
    """How many actors run a job, the fewest and the most, and the plan of each if it is known.

    Also the CPUs that each asks for, nodes on which none may start, and sentences on both.
    """

    pool: tuple[int, int]
    config: EngineConfig
    actor: "ActorPlan | None"
    job: JobPlan | None
    num_cpus: float
    left_out: tuple[Node, ...] = ()
    places: tuple[str, ...] = ()


def _plan_pool(
    model_source: str | Path,
    config: EngineConfig,
    workload: Workload | None,
    cluster: Cluster,
    *,
    num_actors: NumActors,
    min_actors: int | None = None,
    batch_size: int | None = None,
) -> PoolPlan:
    """Plan for a number of actors, or for the one that the cluster has room for.

    Raises:
        ConfigError: Other stages of the pipeline take all places.
    """

    @functools.cache
    def plan_with(count: int) -> PoolPlan:
        pool = (min(min_actors or count, count), count)
        share = _for_rows(config, workload, pool[0])
        rates = _rates_of(share, cluster, config.num_threads, count)
        share, actor = _plan_share(model_source, share, cluster, count, rates=rates)
        job = _job_of(actor, share, cluster, rates, num_actors=pool)
        return PoolPlan(pool, share, actor, job, cluster.cpus_for(pool[1]))

    if num_actors != AUTO:
        return plan_with(num_actors)
    if min_actors is None and _can_use_kinds(cluster, config):
        return _plan_unlike(model_source, config, workload, cluster, batch_size=batch_size)
    places = count = _num_places(cluster)
    if workload is not None:  # of fewer rows than a call has, some actors would get none
        count = min(places, ceil_div(workload.num_rows, batch_size or MIN_ROWS_PER_CALL))
    if workload is not None and min_actors is None:
        count = _fewest_that_pay(count, plan_with)
    found = plan_with(max(count, min_actors or 1))
    few = found.job is not None and found.pool[1] < places
    said = [*_places(found.pool[1], places, cluster, few=few), *cluster.smaller]
    return found if places == len(said) == 1 else _with_places(found, said)


def _with_places(found: PoolPlan, said: Sequence[str]) -> PoolPlan:
    job = found.job if found.job is None else dataclasses.replace(found.job, places=tuple(said))
    return found._replace(job=job, places=tuple(said))


def _can_use_kinds(cluster: Cluster, config: EngineConfig) -> bool:
    """Whether each kind of node can have a plan of its own, instead of that of the smallest."""
    has_others = bool(cluster.num_taken) or cluster.num_generators is not None
    return bool(cluster.kinds) and not has_others and not isinstance(config.hardware, HardwareSpec)


def _plan_unlike(
    model_source: str | Path,
    config: EngineConfig,
    workload: Workload | None,
    cluster: Cluster,
    *,
    batch_size: int | None,
) -> PoolPlan:
    """Plan for one pool on nodes of several kinds; see `raymoe.data.kinds`."""
    kinds = tuple(dataclasses.replace(nodes, num_generators=1) for nodes in cluster.kinds)
    places = sum(nodes.max_actors for nodes in kinds)
    divides_node = any(nodes.num_gpus and nodes.max_actors > nodes.num_nodes for nodes in kinds)
    config = dataclasses.replace(
        choose_sharing(config, actors_per_node=1 + divides_node, num_gpus=cluster.num_gpus),
        divides_node=divides_node,
    )

    @functools.cache
    def plan_kind(number: int, num_rows: int | None) -> KindPlan | None:
        nodes, of_part = kinds[number], config
        if workload is not None and num_rows is not None and workload is not config.workload:
            of_part = dataclasses.replace(config, workload=resized(workload, num_rows))
        _, actor = _plan_share(model_source, of_part, nodes, nodes.max_actors, rates=None)
        if actor is None:
            return None
        return KindPlan(nodes=nodes, num_actors=nodes.max_actors, plan=actor.plan,
                        memory_bytes=actor.memory_bytes)  # fmt: skip

    def plan_of(nodes: Cluster, num_rows: int | None) -> KindPlan | None:
        return plan_kind(kinds.index(nodes), num_rows)

    num_rows = None if workload is None else workload.num_rows
    able = plan_kinds(kinds, num_rows, plan_of)
    if not able:  # nobody knows the model, or the engine says why it does not fit
        pairs = [(nodes, nodes.max_actors) for nodes in kinds]
        found = PoolPlan((places, places), config, None, None, common_cpus(pairs))
        return _with_places(found, _places(places, places, cluster))
    chosen = able if workload is None else kinds_that_pay(able, num_rows, plan_of)
    left_out = tuple(node for nodes in kinds if all(nodes is not one.nodes for one in chosen)
                     for node in nodes.nodes)  # fmt: skip
    if len(chosen) == 1:
        found = _plan_pool(model_source, config, workload, chosen[0].nodes, num_actors=AUTO,
                           batch_size=batch_size)  # fmt: skip
    else:
        found = _job_of_kinds(config, workload, chosen)
    few = found.pool[1] < sum(kind.num_actors for kind in chosen)
    said = [*_places(found.pool[1], places, cluster, few=few), *_left_out(kinds, able, chosen)]
    return _with_places(found, said)._replace(left_out=left_out)


def _left_out(
    kinds: Sequence[Cluster], able: Sequence[KindPlan], chosen: Sequence[KindPlan]
) -> list[str]:
    """Say which nodes run no engine, and why."""
    fitting, used = ({id(kind.nodes) for kind in some} for some in (able, chosen))
    return [
        f"left out: {show_nodes(nodes)}: "
        + ("more would hardly end the job sooner" if id(nodes) in fitting
           else "the model does not fit there")
        for nodes in kinds if id(nodes) not in used
    ]  # fmt: skip


def _job_of_kinds(
    config: EngineConfig, workload: Workload | None, kinds: Sequence[KindPlan]
) -> PoolPlan:
    """Return the plan of one pool on all nodes of these kinds."""
    fastest = kinds[0]
    num_actors = sum(kind.num_actors for kind in kinds)
    if workload is not None and workload is not config.workload:
        config = dataclasses.replace(config, workload=fastest.plan.workload)
    job = JobPlan(
        plan=fastest.plan,
        num_actors=num_actors,
        num_nodes=sum(kind.nodes.num_nodes for kind in kinds),
        is_typical=any(kind.nodes.gpu is None for kind in kinds),
        kinds=tuple(kinds),
        workload=workload,
    )
    actor = ActorPlan(plan=fastest.plan, memory_bytes=min(kind.memory_bytes for kind in kinds))
    cpus = common_cpus((kind.nodes, kind.num_actors) for kind in kinds)
    return PoolPlan((num_actors, num_actors), config, actor, job, cpus)


def _with_tasks(job: JobPlan | None, rows_in_flight: int | None, batch_size: int) -> JobPlan | None:
    """Limit the tasks of an actor on each kind of node to what its plan has room for."""
    if job is None or not job.kinds:
        return job

    def tasks_of(kind: KindPlan) -> int:
        rows = rows_in_flight or ROWS_PER_SEQUENCE * kind.plan.policy.max_num_seqs
        return _num_tasks(min(MAX_CONCURRENT_CALLS, ceil_div(rows, batch_size)))

    kinds = (dataclasses.replace(kind, num_tasks=tasks_of(kind)) for kind in job.kinds)
    return dataclasses.replace(job, kinds=tuple(kinds))


def _sequences_of_a_row(options: Mapping[str, Any]) -> int:
    """Return how often a workload counts a row: for each sample and each call of a rollout."""
    num_samples: int = as_sampling_params(options.get("sampling_params")).n
    return num_samples * (options.get(CALLS_PER_ROW) or 1)


def _num_places(cluster: Cluster) -> int:
    if cluster.max_actors:
        return cluster.max_actors
    raise ConfigError(
        f"the stages before this one take all {cluster.num_taken} places of the cluster. Give each "
        "map_batches_kwargs of the pipeline num_generators=N, so that N generators share the nodes,"
        " or num_actors; or end one stage before the next with materialize()"
    )


def _fewest_that_pay(max_actors: int, plan_with: Callable[[int], PoolPlan]) -> int:
    """Return the fewest actors with which the job ends about when it does with `max_actors`.

    Each loads the model, and weights are read in each step however few rows it has.
    """
    if max_actors == 1:
        return 1
    _, _, actor, job, *_ = plan_with(max_actors)
    if job is None or actor is None:
        return max_actors
    if job.plan.workload.num_rows > actor.max_num_seqs:
        return max_actors  # with fewer, rows would wait for a place in the batch
    limit_s = LATER * job.prediction.seconds

    def is_soon(num_actors: int) -> bool:
        fewer = plan_with(num_actors).job
        return fewer is not None and fewer.prediction.seconds <= limit_s

    return 1 + bisect.bisect_left(range(1, max_actors), True, key=is_soon)


def _is_given(config: EngineConfig, cluster: Cluster) -> bool:
    """Whether the rates of the nodes are known: by the user, or by the name of their GPU."""
    return isinstance(config.hardware, HardwareSpec) or cluster.gpu is not None


def _rates_of(
    config: EngineConfig, cluster: Cluster, num_threads: int | None, num_actors: int
) -> MeasuredNode | None:
    """Measure what an actor has of this machine; None if none runs here, or the rates are given.

    Args:
        num_threads: As the user chose them; None divides the cores.
    """
    if _is_given(config, cluster) or not cluster.is_here:
        return None
    from raymoe.engine.node import measured_share  # noqa: PLC0415 - loads torch

    return measured_share(num_threads, num_actors * (cluster.num_generators or 1))


def _job_of(
    actor: "ActorPlan | None",
    config: EngineConfig,
    cluster: Cluster,
    rates: MeasuredNode | None,
    *,
    num_actors: tuple[int, int],
) -> JobPlan | None:
    """Return the plan of a job whose actors run by this plan.

    Args:
        num_actors: The fewest, whose part of the rows the plan is for, and the most.
    """
    if actor is None:
        return None
    fewest, max_actors = num_actors
    return JobPlan(
        plan=actor.plan,
        num_actors=fewest,
        max_actors=max_actors if max_actors > fewest else None,
        num_nodes=min(fewest, cluster.num_nodes),
        is_typical=rates is None and not _is_given(config, cluster),
        rates=rates,
    )


def _handed_down(config: EngineConfig, job: JobPlan | None) -> EngineConfig:
    """Hand the actors rates and plan, so that those on machines like this one plan nothing."""
    if job is None or config.device == "emulated":
        return config
    planned = job.plan.steps.placement.choice
    if isinstance(config.hardware, HardwareSpec):
        return dataclasses.replace(config, planned=planned)
    if job.rates is None or config.hardware not in {None, "auto"}:
        return config
    return dataclasses.replace(config, hardware=job.rates, planned=planned)


def _find_workload(
    given: Workload | None,
    ds: "Dataset | None",
    model_source: str | Path,
    options: Mapping[str, Any],
) -> Workload | None:
    if given is None:
        if ds is None:
            return None
        calls_per_row = options.get(CALLS_PER_ROW) or 1
        return find_workload(ds, model_source, reader_of(options), calls_per_row)
    return given if read_task_of(options) is None else given.without_generation()


def _with_hardware(config: EngineConfig) -> EngineConfig:
    """Read a file of rates here, for the plan and for all actors."""
    given = config.hardware
    if config.device == "emulated" or not isinstance(given, str) or not is_hardware_file(given):
        return config
    node = find_hardware(given)
    node = node.without_gpu() if config.device == "cpu" else node
    return dataclasses.replace(config, hardware=node)


def _for_rows(config: EngineConfig, workload: Workload | None, num_actors: int) -> EngineConfig:
    """Return the configuration of an actor for its part of the job's rows."""
    if workload is None or workload is config.workload:
        return config
    rows = ceil_div(workload.num_rows, num_actors)
    return dataclasses.replace(config, workload=resized(workload, rows))


def rows_of_a_call(rows_in_flight: int, num_actors: int) -> int:
    """Return the fewest rows per call that allow `rows_in_flight` per actor."""
    calls = min(MAX_CONCURRENT_CALLS, max(MIN_CALLS, MAX_CALLS_OF_A_JOB // num_actors))
    return max(MIN_ROWS_PER_CALL, ceil_div(rows_in_flight, calls))


def _find_cluster(
    config: EngineConfig,
    num_gpus: float | None,
    num_generators: int | None,
    ds: "Dataset | None",
    *,
    remote_args: RemoteArgs,
) -> Cluster:
    device = "cpu" if num_gpus == 0 else config.device
    cluster = Cluster.connected(device, num_gpus or config.tensor_parallel_size, remote_args)
    cluster.advise()
    cluster = dataclasses.replace(cluster, num_generators=num_generators)
    if ds is None or num_generators is not None:
        return cluster
    return dataclasses.replace(cluster, num_taken=_num_taken(ds, cluster))


def _num_taken(ds: "Dataset", cluster: Cluster) -> int:
    """Return the places of engines that stages of actors before this one take."""
    dag = ds._logical_plan.dag  # noqa: SLF001 - as in `find_workload`
    stages = [
        one
        for one in dag.post_order_iter()
        if isinstance(getattr(one, "compute", None), ActorPoolStrategy)
    ]
    if cluster.num_gpus:
        gpus = sum(one.compute.min_size * one.ray_remote_args.get("num_gpus", 0) for one in stages)
        return math.ceil(float(gpus) / cluster.gpus_per_actor)
    # A node without a GPU has room for two, if it is the only one: see `Cluster.cpus_for`.
    if cluster.num_nodes == 1:
        return 0
    sizes = [one.compute.min_size for one in stages if is_generator(one)]
    return sum(map(int, sizes))


def _choose_sizes(rows: int, batch_size: int | None, num_actors: int) -> tuple[int, int]:
    """Return the rows of one call, and how many calls an actor with these rows runs at once."""
    batch_size = batch_size or rows_of_a_call(rows, num_actors)
    return batch_size, min(MAX_CONCURRENT_CALLS, ceil_div(rows, batch_size))


def _default_rows(found: PoolPlan) -> int:
    """Return the rows in flight of an actor: of that with the most sequences, if nodes differ."""
    if found.actor is None:
        return DEFAULT_ROWS
    kinds = () if found.job is None else found.job.kinds
    seqs = [found.actor.max_num_seqs, *(kind.plan.policy.max_num_seqs for kind in kinds)]
    return ROWS_PER_SEQUENCE * max(seqs)


def _for_nodes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that mean the same in other processes: whole paths, and no user's classes."""
    schema = options.get("output_schema")
    if schema is not None:
        options = {**options, "output_schema": OutputSchema.of(schema).as_dict()}
    given = {name: str(options[name]) for name in DIRECTORIES if options.get(name) is not None}
    return {name: value for name, value in options.items() if name != CALLS_PER_ROW} | {
        name: text if "://" in text else str(expanded(text)) for name, text in given.items()
    }


def _upscaling_threshold() -> float:
    """Return at how many tasks of an actor, per call that it runs at once, Ray starts another."""
    config = CurrentContext.get_current().autoscaling_config
    return float(config.actor_pool_util_upscaling_threshold)


def _calls_of_a_share(
    workload: Workload | None, options: Mapping[str, Any], pool: tuple[int, int], batch_size: int
) -> int:
    """Return how many calls an actor may have so that the others of a range find their rows.

    Args:
        pool: The fewest and the most actors.
    """
    if workload is None or pool[0] == pool[1]:
        return MAX_CONCURRENT_CALLS
    num_samples = _sequences_of_a_row(options)
    num_tasks = ceil_div(workload.num_rows, num_samples * pool[1] * batch_size)
    return max(1, math.floor(num_tasks / _upscaling_threshold()))


def _num_tasks(calls: int) -> int:
    return calls + max(2, math.ceil(calls * PREFETCHED_FRACTION))


def _make_pool(fewest: int, num_actors: int, calls: int) -> ActorPoolStrategy:
    num_tasks = _num_tasks(calls)
    if fewest < num_actors:  # with fewer, Ray never starts another actor
        num_tasks = max(calls + 1, math.ceil(calls * _upscaling_threshold()))
    return ActorPoolStrategy(
        min_size=fewest,
        max_size=num_actors,
        max_concurrent_calls_per_actor=calls,
        max_tasks_in_flight_per_actor=num_tasks,
        enable_true_multi_threading=True,
    )


def _plan_share(
    model_source: str | Path,
    config: EngineConfig,
    cluster: Cluster,
    num_actors: int,
    *,
    rates: MeasuredNode | None,
) -> "tuple[EngineConfig, ActorPlan | None]":
    """Return the configuration of an actor on its share of a node, and its plan if it fits."""
    config, node = _on_share(model_source, config, cluster, num_actors, rates=rates)
    neighbours = cluster.actors_per_node(num_actors)
    saved = saved_bytes(model_source, config, neighbours)
    try:
        plan = plan_actor(model_source, config, node)
    except InfeasiblePlanError:
        return config, None  # a larger node may join; else the engine refuses
    if plan is not None:
        own_bytes = max(plan.memory_bytes - saved, plan.memory_bytes // neighbours)
        plan = dataclasses.replace(plan, memory_bytes=own_bytes)
    return config, plan


def _on_share(
    model_source: str | Path,
    config: EngineConfig,
    cluster: Cluster,
    num_actors: int,
    *,
    rates: MeasuredNode | None = None,
) -> tuple[EngineConfig, HardwareSpec | None]:
    """Return the configuration of an actor on its share of a node, and the share if it is known."""
    node = cluster.share(num_actors)
    if node is not None and rates is not None:
        memory_bytes = node.host_memory_bytes
        node = dataclasses.replace(rates.hardware, host_memory_bytes=memory_bytes)
    neighbours = cluster.actors_per_node(num_actors)
    config = choose_sharing(config, actors_per_node=neighbours, num_gpus=cluster.num_gpus)
    if node is not None and neighbours * (cluster.num_generators or 1) > 1:
        # Shared weights count in the plan of each actor, but exist once.
        saved = saved_bytes(model_source, config, neighbours)
        node = dataclasses.replace(node, host_memory_bytes=node.host_memory_bytes + saved)
        config = share_node(config, node)
    return config, node


def _check_counts(num_actors: object, **counts: int | None) -> None:
    for name, value in {"num_actors": num_actors, **counts}.items():
        or_auto = f' or "{AUTO}"' if name == "num_actors" else ""
        is_word = value is None or (or_auto and value == AUTO)
        if not is_word and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1{or_auto}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorPlan:
    """Sizes of one actor.

    Attributes:
        memory_bytes: Weights (the actor's part if shared), KV cache, activations and interpreter.
    """

    plan: Plan
    memory_bytes: int

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are live at once."""
        return self.plan.policy.max_num_seqs


def plan_actor(
    model_source: str | Path, config: EngineConfig, node: HardwareSpec | None
) -> ActorPlan | None:
    """Plan for one actor as its engine will; None if the model or the node is not known here.

    Args:
        model_source: Planned for if its configuration is on this machine.
        node: The actor's share of its node; the hardware of the configuration has precedence.

    Raises:
        InfeasiblePlanError: The model does not fit the node; lists the memory needed.
    """
    given = config.hardware if isinstance(config.hardware, HardwareSpec) else node
    directory = find_files(model_source)
    if given is None or directory is None:
        return None
    spec = read_model(directory, config).with_state_dtype(config.state_dtype)
    if config.compute_dtype == "int8" and spec.quantization is None:
        spec = spec.with_int8()
    dtype = dtype_of(spec, config)
    kv_dtype = dtype if config.kv_dtype == "auto" else config.kv_dtype
    if kv_dtype == "int8":
        spec.check_int8_kv()
    if config.host_memory_bytes is not None:
        given = dataclasses.replace(given, host_memory_bytes=config.host_memory_bytes)
    plan = find_plan(
        spec,
        given,
        config.workload,
        schedule=config.schedule,
        policy=config.policy,
        bytes_per_element=PLAIN_FORMATS[dtype].item_bytes,
        kv_bytes_per_element=KV_ITEM_BYTES[kv_dtype],
        max_model_len=config.max_model_len,
        # If Ray does not know the GPUs of a node, all ranks are planned as one engine.
        tensor_parallel_size=config.tensor_parallel_size if given.has_gpu else 1,
        may_leave_gpu_idle=config.may_leave_gpu_idle,
    )
    return ActorPlan(plan=plan, memory_bytes=plan.host_bytes)


def _choose_num_gpus(
    num_gpus: float | None, config: EngineConfig, cluster: Cluster
) -> float | None:
    num_ranks = config.tensor_parallel_size
    wants_gpu = config.device == "cuda" or (config.device == "auto" and cluster.num_gpus >= 1)
    if num_gpus is None:
        return num_ranks if wants_gpu else None
    if wants_gpu and 1 < num_ranks != num_gpus:
        raise ConfigError(
            f"num_gpus is {num_gpus:g}, but tensor_parallel_size is {num_ranks}: an actor needs a "
            "GPU for each rank; leave num_gpus out"
        )
    return num_gpus
