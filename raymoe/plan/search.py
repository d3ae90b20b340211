"""find_plan: the sizes of a run, what it needs and how fast it will be."""

from raymoe.plan.device_memory import device_footprint, host_footprint
from raymoe.plan.device_pass import DevicePass
from raymoe.plan.device_search import DeviceSearch
from raymoe.plan.host_search import HostPass, HostSearch
from raymoe.plan.plan import DEFAULT_WORKLOAD, Plan, predict_job
from raymoe.plan.policy import Policy
from raymoe.plan.streaming import StreamedPasses
from raymoe.plan.work import ModelWork
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
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

    Raises:
        InfeasiblePlanError: The plan needs more memory than there is; shows what needs what.
    """
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
    name = "waves" if schedule == "auto" else schedule
    if policy is None:
        device_search = DeviceSearch(model, work, hardware, workload, context, schedule=name)
        passes = device_search.best().passes
    else:
        passes = StreamedPasses.of(model, name, policy, bytes_per_element)
    return _plan_device(model, work, hardware, workload, passes)


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


def _plan_device(  # noqa: PLR0917 - the arguments of find_plan, checked
    model: ModelSpec,
    work: ModelWork,
    hardware: HardwareSpec,
    workload: Workload,
    passes: StreamedPasses,
) -> Plan:
    on_host = host_footprint(model, work, passes)
    on_device = device_footprint(model, work, passes)
    on_host.check_fits(
        hardware.host_memory_bytes,
        what=model.name,
        advice="Reduce num_kv_blocks, or choose a node with more host memory.",
    )
    on_device.check_fits(
        hardware.gpu_memory_bytes,
        what=model.name,
        advice="Reduce resident_bytes, pass_tokens or staged_blocks, or use more waves.",
    )
    device_passes = DevicePass(work, hardware, passes)
    return Plan(
        model_name=model.name,
        hardware=hardware,
        workload=workload,
        schedule=passes.schedule,
        policy=passes.policy,
        footprint=on_host,
        device_footprint=on_device,
        passes=device_passes,
        job=predict_job(workload, passes.policy, device_passes),
    )
