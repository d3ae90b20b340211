"""Statuses for tests: of an actor that ran for a while, its plan, and its job."""

import dataclasses
import functools

from raymoe.data.error_groups import ErrorGroup
from raymoe.data.observer import record_step, summarise
from raymoe.data.status import (
    ACTOR_PREFIX,
    JOB_FILE,
    STEP_PREFIX,
    ActorStatus,
    JobStatus,
    RowCounts,
    write_record,
)
from raymoe.engine.accuracy import MeasuredStep
from raymoe.engine.outputs import EngineStats
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.search import find_plan
from raymoe.plan.work import StepLoad
from raymoe.specs.hardware import find_hardware
from raymoe.specs.presets_models import model_preset

NOW_S = 1_800_000_000.0
GROUPS = (
    ErrorGroup(num_rows=2, template="ConfigError: column 'prompt' is empty"),
    ErrorGroup(num_rows=1, template="DecodeError: \x02", quotes=(("'my cell'", False),)),
)
ROWS = RowCounts(
    num_rows=100,
    num_error_rows=3,
    num_found_rows=10,
    num_input_tokens=900,
    num_generated_tokens=1000,
    errors=(("ConfigError", 2), ("DecodeError", 1)),
    error_groups=GROUPS,
)
ENGINE = EngineStats(
    num_finished_rows=97,
    num_error_rows=1,
    num_queued_rows=7,
    num_live_sequences=30,
    num_slots=40,
    num_free_blocks=16,
    num_evicted_blocks=3,
    num_kv_blocks=64,
    num_steps=50,
    num_computed_tokens=2000,
    num_prompt_tokens=900,
    num_cached_tokens=64,
    num_generated_tokens=1100,
    num_preemptions=2,
    busy_s=20.0,
    predicted_s=16.0,
    link_s=5.0,
    generated_tokens_per_s=50.0,
)


def actor(name="node-a-1-abc", *, engine=ENGINE, rows=ROWS, **changes):
    """A status of an actor that generated 10 tokens a second for ten minutes."""
    history = tuple(
        (NOW_S - 600 + 10 * i, float(i), 20.0 * i, 100.0 * i, min(1.0, i / 10), 0.5)
        for i in range(61)
    )
    fields = {
        "node": name.rsplit("-", 2)[0],
        "pid": 1,
        "model": "models/tiny",
        "state": "running",
        "started_unix_s": NOW_S - 600,
        "updated_unix_s": NOW_S,
        "history": history,
        **changes,
    }
    return ActorStatus(actor=name, engine=engine, rows=rows, **fields)


def job(**changes):
    """A job in its tenth minute."""
    fields = {
        "name": "answers",
        "model": "models/tiny",
        "state": "running",
        "started_unix_s": NOW_S - 600,
        "updated_unix_s": NOW_S,
        "elapsed_s": 600.0,
        "error_groups": GROUPS,
        "total_rows": 400,
        "num_rows": 100,
        "num_error_rows": 3,
        "num_input_tokens": 900,
        "num_generated_tokens": 6000,
        "price_per_hour": 0.6,
        "settings": (("max_tokens", "64"),),
        **changes,
    }
    return JobStatus(**fields)


@functools.cache
def planned(*, has_gpu=True):
    """A plan for Mixtral on a node of an L4, with the GPU or without."""
    node = find_hardware("l4")
    policy = Policy(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_prefill_chunk_tokens=256,
        num_kv_blocks=2048,
    )
    if has_gpu:
        policy = dataclasses.replace(policy, device=DevicePolicy())
    else:
        node = node.without_gpu()
    return find_plan(model_preset("mixtral-8x7b"), node, policy=policy)


def passed(plan, name="node-a-1-abc", model="models/tiny"):
    """A pass that took 1.25 times as long as predicted."""
    load = StepLoad(decode_rows=16, decode_context=300)
    timeline = dataclasses.replace(plan.steps.timeline(load).scaled(1.25), name="measured")
    return record_step(name, model, plan, MeasuredStep(load, timeline))


def write(directory, *, job=None, actors=(), steps=()):
    """Write what the processes of a job write."""
    directory.mkdir(parents=True, exist_ok=True)
    if job is not None:
        write_record(directory / JOB_FILE, job)
    for one in actors:
        write_record(directory / f"{ACTOR_PREFIX}{one.actor}.json", one)
    for one in steps:
        write_record(directory / f"{STEP_PREFIX}{one.actor}.json", one)
    return directory


def with_plan(status, plan):
    """An actor that planned this."""
    return dataclasses.replace(status, plan=summarise(plan))
