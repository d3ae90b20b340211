"""Jobs on paper: every token is computed once, within the budgets, and by hand where small."""

import random

import pytest

from raymoe.plan import job
from raymoe.plan.job import estimate_job, job_steps, min_steps, rows_of_bundles
from raymoe.plan.policy import Policy
from raymoe.plan.work import StepLoad, duplicates
from raymoe.specs.workload import Workload


def policy(batch: int, tokens: int, *, blocks: int = 10**6, chunk: int | None = None) -> Policy:
    return Policy(
        max_num_seqs=batch,
        max_num_batched_tokens=tokens,
        max_prefill_chunk_tokens=chunk or tokens,
        num_kv_blocks=blocks,
    )


def seconds_of(load: StepLoad) -> float:
    """Some pass: weights, tokens, attention."""
    pairs = load.decode_rows * load.decode_context
    return 2.0 + 1e-3 * load.tokens + 1e-6 * pairs


def test_rows_that_come_at_once_decode_together() -> None:
    """Three prompts of four tokens in one step, then two steps for the other two tokens."""
    workload = Workload(num_rows=3, prompt_tokens=4, generated_tokens=3)
    loads = [load for load, _ in job_steps(workload, policy(8, 64))]
    assert loads == [
        StepLoad(prompt_tokens=12, prompt_chunk=4),
        StepLoad(decode_rows=3, decode_context=5),
        StepLoad(decode_rows=3, decode_context=6),
    ]


def test_a_long_prompt_takes_passes_of_its_own_and_the_batch_is_refilled() -> None:
    """One row at a time, its prompt in chunks of two."""
    workload = Workload(num_rows=2, prompt_tokens=3, generated_tokens=2)
    loads = [load for load, _ in job_steps(workload, policy(1, 64, chunk=2))]
    row = [
        StepLoad(prompt_tokens=2, prompt_chunk=2),
        StepLoad(prompt_tokens=1, prompt_chunk=1, prompt_spread=2),  # it sees the first chunk
        StepLoad(decode_rows=1, decode_context=4),
    ]
    assert loads == row + row


def random_job(seed: int) -> tuple[Workload, Policy]:
    dice = random.Random(seed)
    prompt, generated = dice.randint(1, 800), dice.randint(1, 400)
    num_rows = dice.choice((dice.randint(1, 60), dice.randint(60, 250), 10**5))
    workload = Workload(num_rows=num_rows, prompt_tokens=prompt, generated_tokens=generated)
    if num_rows <= 250 and dice.random() < 0.5:
        workload = Workload.of_rows(
            tuple(
                (dice.randint(1, 2 * prompt), dice.randint(1, 2 * generated))
                for _ in range(num_rows)
            )
        )
    batch = dice.choice((1, dice.randint(2, 40), 700))
    blocks = int(batch * (prompt + generated) / 32 * dice.choice((0.5, 1, 2))) + 60
    return workload, policy(batch, max(batch, dice.choice((256, 4096))), blocks=blocks)


@pytest.mark.parametrize("seed", range(30))
def test_every_token_is_computed_once(seed: int) -> None:
    workload, sizes = random_job(seed)
    steps = job_steps(workload, sizes)
    decoded = sum(number * load.decode_rows for load, number in steps)
    prompts = sum(number * load.prompt_tokens for load, number in steps)
    # A row of many tokens takes steps of several steps, in which a token more or less is lost.
    close = 1e-9 if workload.generated_tokens <= job.STEPS else 0.01
    generated = workload.total_generated_tokens - workload.num_rows
    assert decoded + prompts == pytest.approx(generated + workload.total_prompt_tokens, rel=close)
    if not workload.row_lengths:  # otherwise the first rows tell how the later ones are
        assert decoded == pytest.approx(generated, rel=0.05)


@pytest.mark.parametrize("seed", range(30))
def test_no_pass_is_larger_than_the_policy(seed: int) -> None:
    workload, sizes = random_job(seed)
    for load, number in job_steps(workload, sizes):
        assert number > 0
        assert load.decode_rows <= sizes.max_num_seqs + 1e-9
        assert load.tokens <= sizes.max_num_batched_tokens + 1e-6
        assert load.prompt_chunk <= sizes.max_prefill_chunk_tokens * job.STEPS


def test_the_cache_holds_back_rows_that_would_overflow_it() -> None:
    workload = Workload(num_rows=100, prompt_tokens=16, generated_tokens=100)
    few = job_steps(workload, policy(100, 4096, blocks=65))
    maximum = max(load.decode_rows for load, _ in few)
    assert 0.7 * 64 * 32 / 132 < maximum <= 1.6 * 64 * 32 / 132
    assert len(few) > 2 * len(job_steps(workload, policy(100, 4096)))


def test_bundles_and_strides_change_little(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(num_rows=1700, prompt_tokens=300, generated_tokens=700)
    sizes = policy(600, 4096, blocks=16_000)
    coarse = estimate_job(workload, sizes, seconds_of)
    monkeypatch.setattr(job, "BUNDLES", 10**9)
    monkeypatch.setattr(job, "STEPS", 10**9)
    fine = estimate_job(workload, sizes, seconds_of)
    assert coarse.seconds == pytest.approx(fine.seconds, rel=0.02)
    assert coarse.num_steps == pytest.approx(fine.num_steps, rel=0.02)


def test_a_long_job_goes_on_as_it_began() -> None:
    """Ten times the rows take ten times as long, but for the beginning and the end."""
    sizes = policy(100, 2048, blocks=2000)
    short, long = (
        Workload(num_rows=rows, prompt_tokens=200, generated_tokens=60) for rows in (2000, 20_000)
    )
    short_s, long_s = (estimate_job(each, sizes, seconds_of).seconds for each in (short, long))
    assert long_s == pytest.approx(10 * short_s, rel=0.06)


@pytest.mark.parametrize("seed", range(10))
def test_a_job_takes_no_fewer_passes_than_full_ones(seed: int) -> None:
    workload, sizes = random_job(seed)
    load, minimum = min_steps(workload, sizes)
    assert load.tokens <= sizes.max_num_batched_tokens * (1 + 1e-9)
    if not workload.row_lengths:
        assert sum(number for _, number in job_steps(workload, sizes)) >= 0.97 * minimum


def test_samples_of_the_same_lengths_enter_in_the_same_order() -> None:
    generator = random.Random(5)
    rows = [
        (round(generator.lognormvariate(4, 1)) + 1, generator.randint(1, 999)) for _ in range(2000)
    ]
    shuffled = generator.sample(rows, len(rows))
    first, second = (
        rows_of_bundles(Workload.of_rows(tuple(each)), 400) for each in (rows, shuffled)
    )
    assert first == second
    means = [sum(generated for _, generated in each) / len(each) for each in (rows, first)]
    assert means[0] == pytest.approx(means[1], rel=0.005)
    few = Workload.of_rows(tuple(rows[:400]))
    assert rows_of_bundles(few, 400) == few.row_lengths  # all are simulated, as they come


@pytest.mark.parametrize("max_prefill_chunk_tokens", [4096, 256])
def test_prompts_attend_at_their_own_lengths(max_prefill_chunk_tokens: int) -> None:
    """With the mean length of a step, half of these pairs would be left out."""
    dice = random.Random(3)
    rows = [
        (min(3000, round(dice.lognormvariate(5.5, 0.9))), dice.randint(1, 80)) for _ in range(150)
    ]
    sizes = policy(64, 4096, blocks=10_000, chunk=max_prefill_chunk_tokens)
    steps = duplicates(job_steps(Workload.of_rows(tuple(rows)), sizes))
    pairs = sum(
        number * load.prompt_tokens * load.prompt_chunk * load.prompt_spread
        for load, number in steps
    )
    chunks = [min(prompt, max_prefill_chunk_tokens) for prompt, _ in rows]
    expected = sum(prompt * chunk for (prompt, _), chunk in zip(rows, chunks, strict=True))
    assert pairs == pytest.approx(expected, rel=0.1)
    alike = Workload(num_rows=400, prompt_tokens=300, generated_tokens=40)
    seen = [load.prompt_spread * load.prompt_chunk for load, _ in job_steps(alike, sizes)]
    assert max(seen) == pytest.approx(min(300, max_prefill_chunk_tokens))
