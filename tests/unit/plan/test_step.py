"""Step times from a few layers, and their bound, against the simulation of all layers."""

import random
from dataclasses import replace

import pytest

from raymoe.plan import step
from raymoe.plan.placement import Placement
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.sizes import Sizes
from raymoe.plan.step import StepModel
from raymoe.plan.work import ModelWork, StepLoad
from raymoe.schedule.builders import RING_SCHEDULES, STREAMING_BUILDERS
from raymoe.schedule.graph import Op, Resource
from raymoe.specs.hardware import find_hardware
from raymoe.specs.presets_models import model_preset
from tests.unit.plan.device_jobs import POINTS, random_jobs


def random_step(seed: int) -> tuple[StepModel, StepLoad]:
    dice = random.Random(seed)
    jobs, steps = random_jobs(seed), None
    while steps is None:
        job, name = next(jobs), dice.choice(("micro_batches", "micro_batches", *STREAMING_BUILDERS))
        sizes = Sizes(job, schedule=name)
        steps = sizes.placement(sizes.fixed(dice.choice(POINTS)))
    rows, tokens = steps.policy.max_num_seqs, steps.policy.max_num_batched_tokens
    load = StepLoad(
        decode_rows=dice.choice((0, rows / 3, rows)),
        decode_context=dice.randint(10, 2000),
        prompt_tokens=dice.choice((0, tokens - rows, 20)),
        prompt_chunk=dice.randint(1, 500),
    )
    if name in RING_SCHEDULES and dice.random() < 0.5:
        device = replace(steps.device, cpu_experts_fraction=dice.choice((0.1, 0.5, 1.0)))
        policy = replace(steps.policy, device=device)
        steps = Placement.of(job.model, name, policy, bytes_per_element=2)
    return dice.choice(StepModel(job.work, job.hardware, steps).splits), load


SEEDS = [*range(5), *(pytest.param(i, marks=pytest.mark.slow) for i in range(5, 25))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_few_layers_tell_how_long_all_take(seed: int) -> None:
    model, load = random_step(seed)
    if load.tokens:
        whole_s = model.timeline(load).makespan_s
        assert model.seconds(load) == pytest.approx(whole_s, rel=0.04)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_step_is_shorter_than_its_busiest_lane(seed: int) -> None:
    model, load = random_step(seed)
    if load.tokens:
        timeline = model.timeline(load)
        busy_s = {resource: timeline.busy_s(resource) for resource in timeline.resources}
        copies = timeline.of(Resource.HTOD)  # pages have the time of all copies
        pages = [span for span in copies if span.task.op is Op.W]
        busy_s[Resource.HTOD] = sum(span.duration_s for span in pages or copies)
        assert model.min_s(load) == pytest.approx(max(busy_s.values()), rel=0.04)
        assert model.min_s(load) <= 1.01 * model.seconds(load)


def test_the_busiest_lane_is_found_from_a_layer_of_each_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 88 layers, whose kinds come in no period, a search looks at thousands of steps."""
    spec, forms = model_preset("nemotron-3-super-120b-a12b"), []
    policy = Policy(
        max_num_seqs=400, max_num_batched_tokens=4096, max_prefill_chunk_tokens=1024,
        num_kv_blocks=20_000, device=DevicePolicy(num_micro_batches=4),
    )  # fmt: skip
    placement = Placement.of(spec, "micro_batches", policy, bytes_per_element=2)
    of_parts = step._by_part
    monkeypatch.setattr(
        step,
        "_by_part",
        lambda name, form, layers: forms.append(form) or of_parts(name, form, layers),
    )
    StepModel(ModelWork.of(spec, 2), find_hardware("a40"), placement).min_s(
        StepLoad(decode_rows=400, decode_context=900)
    )
    assert [len(form.layers) for form in forms] == [3]


def test_an_empty_step_takes_no_time() -> None:
    model, _ = random_step(0)
    assert model.seconds(StepLoad()) == model.min_s(StepLoad()) == 0


def test_the_link_is_busy_with_all_that_streams() -> None:
    model, _ = random_step(3)
    load = StepLoad(decode_rows=1, decode_context=1)
    streamed_s = model.placement.streamed_bytes / model.hardware.htod_bytes_per_s
    assert model.timeline(load).busy_s(Resource.HTOD) >= streamed_s
    assert model.min_s(load) >= streamed_s
