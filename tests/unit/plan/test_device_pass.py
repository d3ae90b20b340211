"""Pass times from a few layers, and their bound, against the simulation of all layers."""

import random

import pytest

from raymoe.plan.device_pass import DevicePass
from raymoe.plan.device_search import DeviceSizes
from raymoe.plan.work import PassLoad
from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.graph import Resource
from tests.unit.plan.device_jobs import POINTS, random_jobs


def random_pass(seed: int) -> tuple[DevicePass, PassLoad]:
    dice = random.Random(seed)
    jobs, passes = random_jobs(seed), None
    while passes is None:
        job, name = next(jobs), dice.choice(("waves", "waves", *STREAMING_BUILDERS))
        sizes = DeviceSizes(job, schedule=name)
        passes = sizes.passes(sizes.fixed(dice.choice(POINTS)))
    rows, tokens = passes.policy.batch_size, passes.policy.pass_tokens
    load = PassLoad(
        decode_rows=dice.choice((0, rows / 3, rows)),
        decode_context=dice.randint(10, 2000),
        prompt_tokens=dice.choice((0, tokens - rows, 20)),
        prompt_chunk=dice.randint(1, 500),
    )
    return DevicePass(job.work, job.hardware, passes), load


@pytest.mark.parametrize("seed", range(25))
def test_a_few_layers_tell_how_long_all_take(seed: int) -> None:
    model, load = random_pass(seed)
    if load.tokens:
        whole_s = model.timeline(load).makespan_s
        assert model.seconds(load) == pytest.approx(whole_s, rel=0.04)


@pytest.mark.parametrize("seed", range(25))
def test_no_pass_is_shorter_than_its_busiest_lane(seed: int) -> None:
    model, load = random_pass(seed)
    if load.tokens:
        timeline = model.timeline(load)
        busiest_s = max(timeline.busy_s(resource) for resource in timeline.resources)
        assert model.least_s(load) == pytest.approx(busiest_s, rel=0.04)
        assert model.least_s(load) <= 1.01 * model.seconds(load)


def test_an_empty_pass_takes_no_time() -> None:
    model, _ = random_pass(0)
    assert model.seconds(PassLoad()) == model.least_s(PassLoad()) == 0


def test_the_link_is_busy_with_all_that_streams() -> None:
    model, _ = random_pass(3)
    load = PassLoad(decode_rows=1, decode_context=1)
    streamed_s = model.passes.cut.streamed_bytes / model.hardware.htod_bytes_per_s
    assert model.timeline(load).busy_s(Resource.HTOD) >= streamed_s
    assert model.least_s(load) >= streamed_s
