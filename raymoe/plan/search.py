"""find_plan: the sizes of a run, what it needs and how fast it will be."""

import contextlib
import gc
from collections.abc import Iterator

from raymoe.errors import ConfigError
from raymoe.plan.device_job import DeviceJob
from raymoe.plan.device_memory import (
    device_footprint,
    host_footprint,
    resident_host_footprint,
)
from raymoe.plan.device_pass import DevicePass
from raymoe.plan.device_search import DeviceSearch
from raymoe.plan.device_sizes import DeviceSizes
from raymoe.plan.host_search import HostPass, HostSearch
from raymoe.plan.plan import DEFAULT_WORKLOAD, Plan, predict_job
from raymoe.plan.policy import Policy
from raymoe.plan.resident import ResidentPass, ResidentSearch
from raymoe.plan.streaming import StreamedPasses
from raymoe.plan.work import ModelWork
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.tensor_shards import shard_model
from raymoe.specs.workload import Workload


def find_plan(  # noqa: PLR0913 - the options of one decision
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload | None = None,
    *,
    schedule: str = "auto",
    policy: Policy | None = None,
    bytes_per_element: int = 2,
    kv_bytes_per_element: int | None = None,
    weight_bytes: int | None = None,
    max_context_tokens: int | None = None,
    tensor_parallel_size: int = 1,
) -> Plan:
    """Choose the policy, or check the given one, and predict what it does.

    Args:
        model: The model.
        hardware: The node, with the host memory that may be used.
        workload: Rows to plan for; a typical job where it is not known.
        schedule: A schedule for a node with a GPU; "auto" chooses.
        policy: Taken as it is.
        bytes_per_element: Of activations, and of weights that are not quantised.
        kv_bytes_per_element: Of the KV cache; that of activations by default.
        weight_bytes: Exact bytes of all weights in kernel form, on a node without a GPU; estimated
            by default.
        max_context_tokens: Longest sequence; the model's by default.
        tensor_parallel_size: GPUs that share each pass, each with a link and a part of the host;
            plan and policy are those of one (MoE-Lightning, section 4.3).

    Raises:
        ConfigError: The model cannot be divided between so many GPUs, or the node has none.
        InfeasiblePlanError: The plan needs more memory than there is; shows what needs what.
    """
    model, hardware = of_one_rank(model, hardware, tensor_parallel_size)
    workload = workload or DEFAULT_WORKLOAD
    work = ModelWork.of(model, bytes_per_element, kv_element_bytes=kv_bytes_per_element)
    context = min(max_context_tokens or model.max_context_tokens, model.max_context_tokens)
    if not hardware.has_gpu:
        search = HostSearch(
            model=model,
            work=work,
            hardware=hardware,
            workload=workload,
            weight_bytes=weight_bytes or model.weight_bytes(bytes_per_element),
            max_context_tokens=context,
        )
        return _plan_host(search, policy)
    job = DeviceJob(
        model=model, work=work, hardware=hardware, workload=workload, max_context_tokens=context
    )
    if policy is None:
        return _choose(job, schedule)
    if schedule == "resident":
        return _plan_resident(ResidentSearch(job), policy)
    name = "waves" if schedule == "auto" else schedule
    return _plan_streamed(job, StreamedPasses.of(model, name, policy, bytes_per_element))


def of_one_rank(
    model: ModelSpec, hardware: HardwareSpec, num_ranks: int
) -> tuple[ModelSpec, HardwareSpec]:
    """What one of several ranks has of the model and of the node; `find_plan` plans that too.

    Raises:
        ConfigError: The model cannot be divided between so many GPUs, or the node has none.
    """
    if num_ranks > 1 and not hardware.has_gpu:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but {hardware.name} has no GPU; leave it out"
        )
    return shard_model(model, num_ranks), hardware.share(num_ranks)


def _choose(job: DeviceJob, schedule: str) -> Plan:
    """The faster of all on the device and of a stream of weights, where both are open."""
    found: list[Plan] = []
    if schedule in {"auto", "resident"}:
        search = ResidentSearch(job)
        policy = search.best()
        if policy is not None:
            found.append(_plan_resident(search, policy))
        elif schedule == "resident":
            search.refuse()
    if schedule != "resident":
        sizes = DeviceSizes(job, schedule="waves" if schedule == "auto" else schedule)
        with _collection_paused():
            best = DeviceSearch(sizes).best()
        if best is not None:
            found.append(_plan_streamed(job, best.passes))
        elif not found:
            sizes.refuse()
    return min(found, key=lambda plan: plan.job.seconds)


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """Without cycles among a million objects the collector would take a fifth of a search."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan_host(search: HostSearch, policy: Policy | None) -> Plan:
    chosen = policy or search.best()
    footprint = search.footprint(chosen)
    search.check(footprint, search.model.name)
    passes = HostPass(search.work, search.hardware)
    return Plan(
        model_name=search.model.name,
        hardware=search.hardware,
        workload=search.workload,
        schedule="in_place",
        policy=chosen,
        footprint=footprint,
        device_footprint=None,
        passes=passes,
        job=predict_job(search.workload, chosen, passes),
    )


def _plan_resident(search: ResidentSearch, policy: Policy) -> Plan:
    job, passes = search.job, ResidentPass(search.job.work, search.job.hardware)
    search.check(policy)
    return Plan(
        model_name=job.model.name,
        hardware=job.hardware,
        workload=job.workload,
        schedule="resident",
        policy=policy,
        footprint=resident_host_footprint(job.model),
        device_footprint=search.footprint(policy),
        passes=passes,
        job=predict_job(job.workload, policy, passes),
        num_ranks=job.model.num_shards,
    )


def _plan_streamed(job: DeviceJob, passes: StreamedPasses) -> Plan:
    on_host = host_footprint(job.model, job.work, passes)
    on_device = device_footprint(job.model, job.work, passes)
    on_host.check_fits(
        job.hardware.host_memory_bytes,
        what=job.model.name,
        advice="Reduce num_kv_blocks, or choose a node with more host memory.",
    )
    on_device.check_fits(
        job.hardware.gpu_memory_bytes,
        what=job.model.name,
        advice="Reduce resident_bytes, pass_tokens or staged_blocks, or use more waves.",
    )
    device_passes = DevicePass(job.work, job.hardware, passes)
    return Plan(
        model_name=job.model.name,
        hardware=job.hardware,
        workload=job.workload,
        schedule=passes.schedule,
        policy=passes.policy,
        footprint=on_host,
        device_footprint=on_device,
        passes=device_passes,
        job=predict_job(job.workload, passes.policy, device_passes),
        num_ranks=job.model.num_shards,
    )
