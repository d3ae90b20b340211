"""Processing of logits against transformers' processors and warpers."""

from concurrent.futures import Future

import numpy as np
import pytest
import torch
import transformers.generation.logits_process as hf

from raymoe.config import SamplingParams
from raymoe.engine import sampler as module
from raymoe.engine.request import Request
from raymoe.engine.sampler import Sampler
from raymoe.engine.sequence import Admission, SequenceTable

VOCABULARY = 50
PROMPT, OUTPUT = [3, 7, 7, 11], [7, 20, 20, 20]


def make_sampler(params_of_slots, eos=(2,)):
    """A sampler whose slots hold PROMPT + OUTPUT."""
    count = len(params_of_slots)
    table = SequenceTable(count, 64, 2 * count)
    sampler = Sampler(table, eos)
    for index, params in enumerate(params_of_slots):
        request = Request(
            prompt=np.array(PROMPT, np.int32),
            params=params,
            max_tokens_total=40,
            seed=5,
            row_key=index,
            future=Future(),
        )
        sample = request.samples[0]
        sample.slot = table.admit(
            Admission(
                tokens=np.array(PROMPT + OUTPUT, np.int32),
                blocks=np.array([2 * index, 2 * index + 1], np.int32),
                prompt_tokens=len(PROMPT),
                rope_tokens=len(PROMPT),
                max_tokens_total=40,
                num_computed_tokens=0,
                arrival=index,
            )
        )
        sampler.admit(sample)
    return sampler


def rows(count, seed=0, scale=3.0):
    return scale * torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def processed(logits_RV, params):
    """Each row by its own parameters, all at once."""
    sampler = make_sampler(params)
    slots = np.array([s.slot for s in sampler._samples], np.int32)
    order = np.argsort([s.request.row_key for s in sampler._samples])
    positions = np.full(len(params), len(PROMPT + OUTPUT), np.int32)
    return sampler.processed(logits_RV, slots[order], positions)


def transformers_processed(logits_V, params):
    ids, scores = torch.tensor([PROMPT + OUTPUT]), logits_V[None].clone()
    for token, bias in (params.logit_bias or {}).items():
        scores[0, token] += bias
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token in set(OUTPUT):
        scores[0, token] -= params.frequency_penalty * OUTPUT.count(token)
        scores[0, token] -= params.presence_penalty
    if params.no_repeat_ngram_size:
        scores = hf.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size)(ids, scores)
    if params.temperature != 1:
        scores = hf.TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = hf.MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0]


CASES = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 500},
    {"top_p": 0.01},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.05, "temperature": 1.7},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.5, "top_p": 0.9},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "presence_penalty": 0.2},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "temperature": 0.5},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 20},
    {"logit_bias": {4: 9.0, 7: -50.0}, "repetition_penalty": 1.2, "top_k": 12, "temperature": 0.7},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_row_is_processed_as_transformers_does(options):
    params = SamplingParams(**options)
    logits_RV = rows(1, seed=3)
    expected_V = transformers_processed(logits_RV[0], params)
    torch.testing.assert_close(processed(logits_RV, [params])[0], expected_V)


def test_rows_with_different_parameters_do_not_influence_each_other():
    params = [SamplingParams(**options) for options in CASES]
    logits_RV = rows(len(params))
    together_RV = processed(logits_RV, params)
    for row, param in enumerate(params):
        alone_V = processed(logits_RV[row : row + 1], [param])[0]
        torch.testing.assert_close(together_RV[row], alone_V, rtol=0, atol=0)


def test_the_given_logits_are_not_changed():
    logits_RV = rows(1)
    before_RV = logits_RV.clone()
    processed(logits_RV, [SamplingParams(top_k=3, repetition_penalty=2.0, temperature=0.1)])
    assert torch.equal(logits_RV, before_RV)


def test_ties_with_the_kth_token_stay():
    logits_RV = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    module.keep_top_k(logits_RV, torch.tensor([2]))
    assert torch.isfinite(logits_RV[0]).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.05, 0.3, 0.5, 0.9, 0.99, 0.99999])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(scale, top_p):
    logits_RV = rows(20, scale=scale)
    before_RV = logits_RV.clone()
    module.keep_top_p(logits_RV, torch.full((20,), top_p))
    for before_V, after_V in zip(before_RV, logits_RV, strict=True):
        is_kept_V = after_V.isfinite()
        assert torch.equal(after_V[is_kept_V], before_V[is_kept_V])
        probability_V = before_V.double().softmax(0)
        kept = probability_V[is_kept_V]
        assert kept.sum() >= top_p - 1e-6
        assert kept.sum() - kept.min() < top_p + 1e-6
        assert is_kept_V.all() or kept.min() >= probability_V[~is_kept_V].max()


def test_equal_logits_at_the_border_stay_in_the_order_of_their_ids():
    logits_RV = torch.tensor([[1.0, 3.0, 1.0, 1.0, float("-inf"), 1.0]])
    module.keep_top_p(logits_RV, torch.tensor([0.75]))  # 3.0 has 0.649, each 1.0 has 0.088
    assert logits_RV[0].isfinite().tolist() == [True, True, True, False, False, False]


def test_eos_and_stop_tokens_are_impossible_before_min_tokens():
    params = SamplingParams(min_tokens=5, stop_token_ids=[9], temperature=0)
    sampler = make_sampler([params])
    slots, logits_RV = np.zeros(1, np.int32), torch.zeros(1, VOCABULARY)
    logits_RV[0, [2, 9, 30]] = torch.tensor([9.0, 8.0, 7.0])
    at = len(PROMPT) + 4
    assert sampler.choose(logits_RV, slots, np.array([at], np.int32)).tolist() == [30]
    assert sampler.choose(logits_RV, slots, np.array([at + 1], np.int32)).tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_choice_does_not_depend_on_the_other_rows(dtype, monkeypatch):
    params = [SamplingParams(**options) for options in [*CASES, {"temperature": 0.0}]]
    sampler = make_sampler(params)
    slots = np.array([s.slot for s in sampler._samples], np.int32)
    positions = np.arange(8, 8 + len(params), dtype=np.int32)
    logits_RV = rows(len(params)).to(dtype)
    together = sampler.choose(logits_RV, slots, positions)
    order = np.random.default_rng(0).permutation(len(params))
    shuffled = sampler.choose(logits_RV[torch.from_numpy(order)], slots[order], positions[order])
    assert shuffled.tolist() == together[order].tolist()
    alone = [
        sampler.choose(logits_RV[row : row + 1], slots[row : row + 1], positions[row : row + 1])[0]
        for row in range(len(params))
    ]
    assert alone == together.tolist()
    some = np.flatnonzero(np.arange(len(params)) % 3)
    monkeypatch.setattr("raymoe.engine.sampler.SLICE_ELEMENTS", 2 * VOCABULARY)
    chosen = sampler.choose(logits_RV, slots[some], positions[some], some)
    assert chosen.tolist() == together[some].tolist()


def test_logits_that_allow_no_token_give_minus_one():
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3)]
    sampler = make_sampler(params)
    slots = np.array([s.slot for s in sampler._samples], np.int32)
    logits_RV = torch.full((3, VOCABULARY), float("-inf"))
    assert sampler.choose(logits_RV, slots, np.full(3, 8, np.int32)).tolist() == [-1, -1, -1]
    logits_RV = rows(3)
    logits_RV[:, 4] = float("nan")
    assert sampler.choose(logits_RV, slots, np.full(3, 8, np.int32)).tolist() == [-1, -1, -1]
