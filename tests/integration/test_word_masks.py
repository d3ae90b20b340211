"""Words and tokens that are not generated, and what texts keep: as vLLM means it."""

import itertools
import random
import string

import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessor, MixtralForCausalLM
from transformers.generation import logits_process as hf

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.plan.policy import Policy
from tests.tiny import make_checkpoint

NUM_TOKENS = 24
ALPHABET = "abc "
POLICY = Policy(
    max_num_seqs=8, max_num_batched_tokens=64, max_prefill_chunk_tokens=64, num_kv_blocks=32
)
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS}


class OfOutput(LogitsProcessor):
    """Applies to the generated tokens alone: transformers reads the prompt too."""

    def __init__(self, inner, num_prompt_tokens):
        self._inner, self._num_prompt_tokens = inner, num_prompt_tokens

    def __call__(self, input_ids, scores):
        return self._inner(input_ids[:, self._num_prompt_tokens :], scores)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), sliding_window=None)
    return MixtralForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), directory


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model[1])


@pytest.fixture(scope="module")
def engine(model):
    config = EngineConfig(dtype="float32", device="cpu", policy=POLICY, linger_s=0.0)
    with Engine.from_pretrained(model[1], config) as engine:
        yield engine


def draw(seed, tokenizer):
    """Rows with random words and tokens of a small alphabet, in which words are frequent."""
    chance = random.Random(seed)
    begin = "".join(chance.choices(string.ascii_letters, k=40))
    rows = []
    for _ in range(5):
        words = ["".join(chance.choices(ALPHABET, k=chance.randint(1, 3))) for _ in range(3)]
        allowed = tokenizer.encode(ALPHABET, add_special_tokens=False)
        if chance.random() < 0.3:
            allowed.append(tokenizer.eos_token_id)
        if chance.random() < 0.2:
            words = []
        prompt = begin + "".join(chance.choices(ALPHABET, k=chance.randint(1, 8)))
        if len({word for word in words if len(word) == 1}) < len(ALPHABET) - 1:
            rows.append((prompt, words, allowed))
    return rows


def expected(model, tokenizer, prompt, words, allowed, eos_bias=0.0):
    """Return what transformers generates."""
    ids = tokenizer.encode(prompt, return_tensors="pt")
    masks = [hf.PrefixConstrainedLogitsProcessor(lambda _batch, _ids: allowed, 1)]
    if words:
        encoded = [tokenizer.encode(word, add_special_tokens=False) for word in words]
        masks.append(OfOutput(hf.NoBadWordsLogitsProcessor(encoded), ids.shape[1]))
    if eos_bias:
        masks.append(hf.SequenceBiasLogitsProcessor({(tokenizer.eos_token_id,): eos_bias}))
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            logits_processor=hf.LogitsProcessorList(masks),
        )
    return out[0, ids.shape[1] :].tolist()


def stopped(tokenizer, tokens, stop, *, is_whole, keeps_special):
    """Return the tokens up to the first stop string, and the text, with it if it is whole."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=not keeps_special)
        found = [(text.index(one), one) for one in stop if one in text]
        if found:
            place, one = min(found)
            return tokens[:count], text[: place + len(one) * is_whole]
    is_ended = tokens[-1] == tokenizer.eos_token_id
    shown = tokens[:-1] if is_ended and not is_whole else tokens
    return tokens, tokenizer.decode(shown, skip_special_tokens=not keeps_special)


@pytest.fixture
def preempting(engine, monkeypatch):
    """The engine, whose last sequence loses its blocks after some steps."""
    scheduler, calls = engine._core.scheduler, []

    def preempt_sometimes():
        calls.append(scheduler.table.live_slots())
        if len(calls) % 9 == 0 and len(calls[-1]) > 1:
            scheduler._preempt(scheduler.sample_of(int(calls[-1][-1])))

    monkeypatch.setattr(engine._core, "_replan", preempt_sometimes)
    before = engine.stats()
    yield engine
    after = engine.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.num_cached_tokens > before.num_cached_tokens


SEEDS = pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 52), marks=pytest.mark.slow)], ids=["few", "many"]
)


@SEEDS
def test_words_and_tokens_are_masked_as_in_transformers(model, tokenizer, preempting, seeds):
    """Whatever is preempted, and beside rows that share the begin of their prompts."""
    for seed in seeds:
        rows = draw(seed, tokenizer)
        params = [GREEDY | {"bad_words": words, "allowed_token_ids": ids} for _, words, ids in rows]
        answers = preempting.generate([prompt for prompt, _, _ in rows], params)
        for row, answer in zip(rows, answers, strict=True):
            assert not answer.error
            assert list(answer.token_ids) == expected(model[0], tokenizer, *row), row
            assert not any(word in answer.text for word in row[1])


@SEEDS
def test_texts_keep_stop_strings_and_special_tokens_where_asked(
    model, tokenizer, preempting, seeds
):
    """Tokens and texts are those of transformers up to the first stop string."""
    allowed = [*tokenizer.encode(ALPHABET, add_special_tokens=False), *tokenizer.all_special_ids]
    ends = set()
    for seed in seeds:
        chance = random.Random(seed)
        eos_bias = -100.0 * (seed % 2)  # else it ends most rows
        prompts, params, wanted = [], [], []
        for prompt, _, _ in draw(seed, tokenizer):
            tokens = expected(model[0], tokenizer, prompt, [], allowed, eos_bias)
            stop = ["".join(chance.choices(ALPHABET, k=chance.randint(1, 2))) for _ in range(2)]
            for is_whole, keeps_special in itertools.product((False, True), repeat=2):
                prompts.append(prompt)
                params.append(GREEDY | {
                    "allowed_token_ids": allowed, "stop": stop,
                    "skip_special_tokens": not keeps_special,
                    "include_stop_str_in_output": is_whole,
                    "logit_bias": {tokenizer.eos_token_id: eos_bias},
                })  # fmt: skip
                form = {"is_whole": is_whole, "keeps_special": keeps_special}
                wanted.append(stopped(tokenizer, tokens, stop, **form))
                ends.add((wanted[-1][0][-1] == tokenizer.eos_token_id, *form.values()))
        answers = preempting.generate(prompts, params)
        for answer, row in zip(answers, wanted, strict=True):
            assert (list(answer.token_ids), answer.text) == row
    assert len(ends) == 8  # by a string and by EOS, each with and without both


def test_words_count_with_a_space_before_them_where_they_are_one_word(engine):
    """As vLLM encodes them, with a tokenizer that has tokens for " yes" and "yes"."""

    class Words:
        def encode_all(self, texts):
            known = {"yes": [5], " yes": [6], "no way": [7, 8], " no way": [9, 3, 8]}
            return [torch.tensor(known[text.text]).numpy() for text in texts]

    processor = engine._input_processor
    own, processor._tokenizer = processor._tokenizer, Words()
    try:
        assert processor._encode_words_once(("yes", "no way")) == ((5,), (6,), (7, 8))
    finally:
        processor._tokenizer = own
