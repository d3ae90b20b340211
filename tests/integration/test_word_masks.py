"""Words and tokens that are not generated, and what texts keep: as vLLM means it."""

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


def expected(model, tokenizer, prompt, words, allowed):
    ids = tokenizer.encode(prompt, return_tensors="pt")
    masks = [hf.PrefixConstrainedLogitsProcessor(lambda _batch, _ids: allowed, 1)]
    if words:
        encoded = [tokenizer.encode(word, add_special_tokens=False) for word in words]
        masks.append(OfOutput(hf.NoBadWordsLogitsProcessor(encoded), ids.shape[1]))
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            logits_processor=hf.LogitsProcessorList(masks),
        )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 52), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_words_and_tokens_are_masked_as_in_transformers(
    model, tokenizer, engine, seeds, monkeypatch
):
    """Whatever is preempted, and beside rows that share the begin of their prompts."""
    scheduler, calls = engine._core.scheduler, []

    def preempt_sometimes():
        calls.append(scheduler.table.live_slots())
        if len(calls) % 9 == 0 and len(calls[-1]) > 1:
            scheduler._preempt(scheduler.sample_of(int(calls[-1][-1])))

    monkeypatch.setattr(engine._core, "_replan", preempt_sometimes)
    for seed in seeds:
        rows = draw(seed, tokenizer)
        params = [GREEDY | {"bad_words": words, "allowed_token_ids": ids} for _, words, ids in rows]
        answers = engine.generate([prompt for prompt, _, _ in rows], params)
        for row, answer in zip(rows, answers, strict=True):
            assert not answer.error
            assert list(answer.token_ids) == expected(model[0], tokenizer, *row), row
            assert not any(word in answer.text for word in row[1])
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 52), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_texts_keep_stop_strings_and_special_tokens_where_asked(model, tokenizer, engine, seeds):
    special = tokenizer.all_special_ids
    allowed = [*tokenizer.encode(ALPHABET, add_special_tokens=False), *special]
    kinds = set()
    for seed in seeds:
        chance = random.Random(seed)
        rows = draw(seed, tokenizer)
        bias = {tokenizer.eos_token_id: -100.0 * (seed % 2)}  # else it ends most rows
        basic = GREEDY | {"allowed_token_ids": allowed, "logit_bias": bias}
        stop = ["".join(chance.choices(ALPHABET, k=chance.randint(1, 2))) for _ in range(2)]
        for prompt, _, _ in rows:
            for keeps_special in (False, True):
                more = {"stop": stop, "skip_special_tokens": not keeps_special}
                (cut,) = engine.generate([prompt], basic | more)
                (whole,) = engine.generate(
                    [prompt], basic | more | {"include_stop_str_in_output": True}
                )
                assert cut.token_ids == whole.token_ids
                text = tokenizer.decode(cut.token_ids, skip_special_tokens=not keeps_special)
                assert text.startswith(whole.text)
                end = whole.text.removeprefix(cut.text)
                is_token = cut.token_ids[-1] == tokenizer.eos_token_id
                kinds.add((end and (is_token or "string"), keeps_special))
                if is_token:
                    assert end == tokenizer.eos_token * keeps_special
                else:
                    assert end in stop if cut.finish_reason == "stop" else not end
    assert {("string", False), ("string", True)} <= kinds


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
