"""What a real job is predicted to reach here, and what limits it."""

from functools import partial

from raymoe.config import EngineConfig, Settings
from raymoe.doctor.examine import Check, Outcome, Status, Target
from raymoe.engine.node import find_node
from raymoe.errors import InfeasiblePlanError
from raymoe.measure.kept import identify_machine, load_profile
from raymoe.plan.bound import GEMM_EFFICIENCY, device_bound, job_bound
from raymoe.plan.plan import RESOURCE_NAMES
from raymoe.plan.search import find_plan
from raymoe.plan.work import ModelWork
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload

MODELS = ("mixtral-8x7b", "gpt-oss-20b")
JOB = Workload(num_rows=10_000, prompt_tokens=512, generated_tokens=128)
ELEMENT_BYTES = 2
NEAR_BOUND = 0.7


def checks(target: Target) -> list[Check]:
    plans = [Check(f"plan of {name}", partial(plan, target, name)) for name in MODELS]
    return [Check("profile", partial(profile, target)), *plans]


def profile(target: Target) -> Outcome:
    settings = Settings.from_environment()
    machine = identify_machine(target.num_threads or settings.num_threads)
    if load_profile(settings.cache_directory, machine) is not None:
        return Outcome(f"{settings.cache_directory / machine.file_name}")
    advice = (
        "plans use quick measurements, and for the GPU the numbers of its data sheet: run `raymoe "
        "profile` once, which takes a minute, while nothing else runs"
    )
    return Outcome("none", Status.WARNING, advice)


def plan(target: Target, name: str) -> Outcome:
    model = model_preset(name)
    config = EngineConfig(device=target.device, num_threads=target.num_threads)
    node = find_node(config, Settings.from_environment(), target.device)
    longest = JOB.prompt_tokens + JOB.generated_tokens
    try:
        found = find_plan(model, node, JOB, max_model_len=longest)
    except InfeasiblePlanError as error:
        advice = str(error).splitlines()[0]
        return Outcome("does not fit", Status.SKIPPED, advice)
    share = _bound_s(model, found.hardware) / found.job.seconds
    value = (
        f"{found.tokens_per_s:.1f} tokens/s predicted for {JOB.num_rows:,} rows of "
        f"{JOB.prompt_tokens} + {JOB.generated_tokens}, {100 * share:.0f} % of the bound; schedule "
        f"{found.schedule}; decode waits for {RESOURCE_NAMES[found.bound]}"
    )
    if share >= NEAR_BOUND:
        return Outcome(value)
    advice = (
        f"raymoe plan --model {name} --hardware here --what-if shows what more memory, a faster "
        "link or more cores would gain"
    )
    return Outcome(value, Status.WARNING, advice)


def _bound_s(model: ModelSpec, node: HardwareSpec) -> float:
    if node.has_gpu:
        return device_bound(ModelWork.of(model, ELEMENT_BYTES), node, JOB).seconds
    return job_bound(
        model,
        [JOB.prompt_tokens] * JOB.num_rows,
        JOB.generated_tokens,
        flop_per_s=GEMM_EFFICIENCY * node.host_flop_per_s,
        bytes_per_s=node.host_bytes_per_s,
    ).total_s
