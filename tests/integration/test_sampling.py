"""Sampling of a real model: the distribution that transformers samples from, and determinism."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.plan.policy import Policy
from tests.parity.configurations import CONFIGURATIONS
from tests.parity.oracle import make_checkpoint

PROMPT = [5, 17, 17, 80, 3, 120, 44, 9]
NUM_ROWS = 6000
# Logits of about 1.7 standard deviations: an error of 10 % in the temperature shows.
SHAPE = {"initializer_range": 0.25}


@pytest.fixture(scope="module")
def model_and_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    configuration = CONFIGURATIONS[0]
    configuration = type(configuration)(
        name="sampling", family=configuration.family, fields=configuration.fields | SHAPE
    )
    return make_checkpoint(configuration, directory), directory


@pytest.fixture(scope="module")
def make_engine(model_and_directory):
    def make(**sizes: int) -> Engine:
        policy = {
            "max_num_seqs": 512,
            "max_num_batched_tokens": 4096,
            "max_prefill_chunk_tokens": 4096,
            "num_kv_blocks": 1024,
        }
        config = EngineConfig(dtype="float32", policy=Policy(**(policy | sizes)), linger_s=0.0)
        return Engine.from_pretrained(model_and_directory[1], config)

    return make


@pytest.fixture(scope="module")
def engine(make_engine):
    with make_engine() as engine:
        yield engine


def sample(engine, prompts, params, keys):
    generations = [f.result(120) for f in engine.submit(prompts, params, row_keys=keys)]
    assert all(not g.error for g in generations)
    return generations


def processed_probabilities(model, tokens, **options):
    """What transformers would draw the next token from."""
    output = model.generate(
        torch.tensor([tokens]),
        do_sample=True,
        max_new_tokens=1,
        output_scores=True,
        return_dict_in_generate=True,
        **({"top_k": 0} | options),
    )
    return output.scores[0][0].double().softmax(0).numpy()


def p_value(counts, probabilities) -> float:
    """Of the chi-square test; rare outcomes are counted together."""
    expected = probabilities * counts.sum()
    assert counts[probabilities == 0].sum() == 0, "an impossible token was drawn"
    is_rare = expected < 5
    counts = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    if expected[-1] == 0:
        counts, expected = counts[:-1], expected[:-1]
    if len(counts) == 1:
        return 1.0
    return chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


@pytest.mark.parametrize(
    "options",
    [
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                {"temperature": 1.0},
                {"temperature": 0.5},
                {"temperature": 2.0, "top_k": 20},
                {"top_p": 0.7},
                {"min_p": 0.2},
                {"repetition_penalty": 1.8},
                {"temperature": 0.7, "top_p": 0.95, "repetition_penalty": 0.8},
            )
        ),
        {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.03, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_transformers(engine, model_and_directory, options):
    params = {"max_tokens": 1} | options
    generations = sample(engine, [PROMPT] * NUM_ROWS, params, range(NUM_ROWS))
    drawn = np.array([generation.token_ids[0] for generation in generations])
    probabilities = processed_probabilities(model_and_directory[0], PROMPT, **options)
    assert p_value(np.bincount(drawn, minlength=len(probabilities)), probabilities) > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"presence_penalty": 1.5})),
        {"frequency_penalty": 1.0, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_penalties_see_the_tokens_that_were_generated(engine, model_and_directory, options):
    """Two tokens out of four each: 16 pairs, whose second factor depends on the first token."""
    model, top = model_and_directory[0], 4
    ours = {"max_tokens": 2, "top_k": top} | options
    generations = sample(engine, [PROMPT] * NUM_ROWS, ours, range(NUM_ROWS))
    drawn = [generation.token_ids for generation in generations]
    first = pair_probabilities(model, PROMPT, [], options, top)
    pairs, counts = {}, {}
    for token in np.flatnonzero(first):
        second = pair_probabilities(model, [*PROMPT, int(token)], [int(token)], options, top)
        for other in np.flatnonzero(second):
            pairs[int(token), int(other)] = first[token] * second[other]
    for pair in drawn:
        counts[pair] = counts.get(pair, 0) + 1
    assert set(counts) <= set(pairs)
    observed = np.array([counts.get(pair, 0) for pair in pairs])
    assert p_value(observed, np.array(list(pairs.values()))) > 1e-3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_is_repeated_as_in_transformers(engine, model_and_directory, size):
    model = model_and_directory[0]
    ours = {"temperature": 0, "max_tokens": 24, "no_repeat_ngram_size": size, "ignore_eos": True}
    (generation,) = engine.generate([PROMPT], ours)
    with torch.no_grad():
        theirs = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=24,
            no_repeat_ngram_size=size,
            eos_token_id=None,
        )
    assert list(generation.token_ids) == theirs[0, len(PROMPT) :].tolist()


def pair_probabilities(model, tokens, generated, options, top):
    with torch.no_grad():
        scores = model(torch.tensor([tokens])).logits[0, -1].double()
    penalty = options.get("repetition_penalty", 1.0)
    for token in set(tokens):
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for token in set(generated):
        scores[token] -= options.get("presence_penalty", 0.0)
        scores[token] -= options.get("frequency_penalty", 0.0) * generated.count(token)
    scores[scores < scores.topk(top).values[-1]] = -torch.inf
    return scores.softmax(0).numpy()


MIXED = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 12},
    {"temperature": 1.2, "top_p": 0.8, "repetition_penalty": 1.1},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.5},
    {"temperature": 1.0, "n": 2},
]


def mixed_rows(num_rows: int):
    prompts = [[(7 * row + i) % 199 for i in range(1 + 5 * row % 60)] for row in range(num_rows)]
    params = [MIXED[row % len(MIXED)] | {"max_tokens": 40, "seed": 3} for row in range(num_rows)]
    return prompts, params


def tokens_of(generation):
    return [generation.token_ids, *(other.token_ids for other in generation.others)]


def test_a_seed_gives_the_same_tokens_whatever_batch_order_and_preemption(engine, make_engine):
    prompts, params = mixed_rows(16)
    expected = [tokens_of(g) for g in engine.generate(prompts, params)]
    order = np.random.default_rng(1).permutation(len(prompts))
    shuffled = engine.generate([prompts[r] for r in order], [params[r] for r in order])
    assert [tokens_of(g) for g in shuffled] == [expected[r] for r in order]
    with make_engine(max_num_seqs=1, max_prefill_chunk_tokens=7) as one_at_a_time:
        assert [tokens_of(g) for g in one_at_a_time.generate(prompts, params)] == expected
    with make_engine(num_kv_blocks=8, max_num_seqs=16) as small:
        small.generate([[1]] * 20, {"max_tokens": 1})
        assert [tokens_of(g) for g in small.generate(prompts, params)] == expected
        assert small.stats().num_preemptions > 0


def test_seed_row_key_and_sample_index_all_change_the_tokens(engine):
    params = {"temperature": 1.5, "max_tokens": 12}
    rows = [
        sample(engine, [PROMPT], params | {"seed": seed, "n": 2}, [key])[0]
        for seed, key in itertools.product([1, 2], ["a", "b"])
    ]
    tokens = [tuple(sample) for row in rows for sample in tokens_of(row)]
    assert len(set(tokens)) == len(tokens) == 8


def test_without_a_row_key_the_prompt_the_parameters_and_the_occurrence_decide(engine):
    params = {"temperature": 1.5, "max_tokens": 12}
    one, again, other = engine.generate([PROMPT, PROMPT, [*PROMPT, 1]], params)
    assert len({one.token_ids, again.token_ids, other.token_ids}) == 3
    other, one_later, again_later = engine.generate([[*PROMPT, 1], PROMPT, PROMPT], params)
    assert (one_later.token_ids, again_later.token_ids) == (one.token_ids, again.token_ids)


def test_logprobs_and_prompt_logprobs_are_those_of_transformers(engine, model_and_directory):
    (generation,) = engine.generate(
        [PROMPT], {"max_tokens": 6, "temperature": 0.9, "logprobs": 3, "prompt_logprobs": 2}
    )
    tokens = [*PROMPT, *generation.token_ids]
    with torch.no_grad():
        logprobs_TV = model_and_directory[0](torch.tensor([tokens])).logits[0].log_softmax(-1)
    entries = [*generation.prompt_logprobs[1:], *generation.logprobs]
    assert len(entries) == len(tokens) - 1
    for position, entry in enumerate(entries):
        row_V = logprobs_TV[position]
        assert entry.token_id == tokens[position + 1]
        assert entry.logprob == pytest.approx(float(row_V[entry.token_id]), abs=1e-4)
        best = row_V.topk(len(entry.top))
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
