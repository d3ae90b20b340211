"""Jobs on nodes with a GPU, at random from the presets."""

import random
from collections.abc import Iterator
from dataclasses import replace

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.papers.policies import PaperPolicies
from raymoe.plan.placement import LayerBytes, Placement, layer_sizes
from raymoe.plan.plan import Plan
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.search import find_plan
from raymoe.plan.sizes import JobOnNode, SearchPoint, SearchSpace, Sizes
from raymoe.plan.work import ModelWork
from raymoe.specs.hardware import HARDWARE_PRESETS, HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS, model_preset
from raymoe.specs.workload import Workload

POINTS = tuple(SearchSpace(cpu_experts_fraction=(0.0, 0.5)).points())


def device_job(
    model: ModelSpec | str,
    node: HardwareSpec,
    workload: Workload,
    max_model_len: int | None = None,
) -> JobOnNode:
    spec = model_preset(model) if isinstance(model, str) else model
    return JobOnNode(
        model=spec,
        work=ModelWork.of(spec, 2),
        hardware=node,
        workload=workload,
        max_model_len=max_model_len or max(4096, 2 * workload.context_tokens),
    )


def random_workload(dice: random.Random) -> Workload:
    """From a few rows that all fit at once to more than anyone waits for."""
    return Workload(
        num_rows=dice.choice((dice.randint(50, 500), dice.randint(1000, 5000), 20_000, 10**6)),
        prompt_tokens=round(2 ** dice.uniform(5, 12)),
        generated_tokens=round(2 ** dice.uniform(4, 11)),
    )


def random_jobs(seed: int) -> Iterator[JobOnNode]:
    """Presets with their own host memory, twice or four times of it; jobs that fit somehow."""
    dice = random.Random(seed)
    while True:
        node = dice.choice(list(HARDWARE_PRESETS.values()))
        node = replace(node, host_memory_bytes=dice.choice((1, 2, 4)) * node.host_memory_bytes)
        job = device_job(dice.choice(list(MODEL_PRESETS)), node, random_workload(dice))
        if Sizes(job).placement(SearchPoint(0.125, 2, False, 1, 1.0, 2048)) is not None:
            yield job


def placed(
    sizes: tuple[LayerBytes, ...],
    *,
    num_groups: int = 1,
    ring_slots: int = 1,
    **device: object,
) -> Placement:
    """Layers of these sizes where weights stream, in a policy of no other interest."""
    policy = Policy(
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_prefill_chunk_tokens=1,
        num_kv_blocks=1,
        device=DevicePolicy(expert_groups=num_groups, ring_slots=ring_slots, **device),
    )
    return Placement.of_layers(sizes, "micro_batches", policy)


def placed_model(model: ModelSpec, bytes_per_element: int, **device: object) -> Placement:
    """A model of which all streams, but for what the policy keeps."""
    return placed(layer_sizes(model, bytes_per_element), **device)


def paper_plans(job: JobOnNode) -> Iterator[Plan]:
    """Every schedule of a paper with its own policy, where it has one that fits.

    FlexGen's, FastDecode's and the plain one take that of MoE-Lightning, who compares them so.
    """
    papers = PaperPolicies(job.model, job.hardware, job.workload)
    like_cgopipe = ("cgopipe", "flexgen_s3", "flexgen_s4", "fastdecode", "layer_by_layer")
    choosers = dict.fromkeys(like_cgopipe, papers.cgopipe)
    choosers |= {"vslpipe": papers.vslpipe, "module_batching": papers.module_batching}
    for schedule, choose in choosers.items():
        try:
            yield find_plan(
                job.model,
                job.hardware,
                job.workload,
                schedule=schedule,
                policy=choose(),
                max_model_len=job.max_model_len,
            )
        except (ConfigError, InfeasiblePlanError):
            continue
