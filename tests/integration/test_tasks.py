"""Score, classify and embed against transformers in float32, however rows are batched."""

import numpy as np
import pytest
import torch
import transformers

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.plan.policy import Policy
from tests.parity.configurations import FAMILY_CONFIGS, first_of_each_family
from tests.parity.oracle import make_prompts, randomise

SLOW_FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3")
FAMILIES = ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES)]
BY_FAMILY = {one.family: one for one in first_of_each_family()}
POLICIES = (
    {},
    {"max_num_seqs": 1},
    {"max_prefill_chunk_tokens": 7, "max_num_batched_tokens": 40},
    {"num_kv_blocks": 12},
)


def make(family, directory, auto, **fields):
    configuration = BY_FAMILY[family]
    config_class = getattr(transformers, FAMILY_CONFIGS[family])
    config = config_class(**{**configuration.fields, **fields}, attn_implementation="eager")
    with torch.random.fork_rng():
        torch.manual_seed(np.random.default_rng().integers(1 << 30))
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        randomise(model)
    model.save_pretrained(directory)
    return model, make_prompts(configuration, 12)


def open_engine(directory, head="auto", *, device="cpu", schedule="auto", **policy):
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_prefill_chunk_tokens": 512}
    sizes |= {"num_kv_blocks": 100} | policy
    config = EngineConfig(
        dtype="float32", head=head, device=device, schedule=schedule, linger_s=0.0,
        policy=Policy(**sizes) if device == "cpu" else None,
    )  # fmt: skip
    return Engine.from_pretrained(directory, config)


@torch.inference_mode()
def expected_logprobs(model, tokens, num_targets):
    logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    targets = torch.tensor(tokens[1:])
    chosen = logprobs.gather(1, targets[:, None])[-num_targets:, 0]
    return chosen.numpy(), bool((logprobs.argmax(1) == targets)[-num_targets:].all())


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family, tmp_path):
    model, prompts = make(family, tmp_path, transformers.AutoModelForCausalLM)
    ends = [row[: 1 + index % 5] for index, row in enumerate(prompts[::-1])]
    prompts[3] = []  # a document
    ends[3] = prompts[0] + prompts[1] + prompts[2]
    expected = [
        expected_logprobs(model, [*prompt, *end], len(end) - (not prompt))
        for prompt, end in zip(prompts, ends, strict=True)
    ]
    for policy in POLICIES:
        with open_engine(tmp_path, **policy) as engine:
            for order in (range(12), range(12)[::-1]):
                found = engine.score(
                    [prompts[i] for i in order], [ends[i] for i in order], token_logprobs=True
                )
                for i, one in zip(order, found, strict=True):
                    assert one.error == ""
                    logprobs, is_greedy = expected[i]
                    np.testing.assert_allclose(
                        one.values["token_logprobs"], logprobs, atol=2e-4, rtol=1e-4
                    )
                    assert one.values["is_greedy"] == is_greedy
                    assert one.values["num_scored_tokens"] == len(logprobs)
                    assert one.values["logprob"] == pytest.approx(logprobs.sum(), abs=2e-3)
            assert engine.stats().num_free_blocks == engine.policy.num_kv_blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers(family, tmp_path):
    model, prompts = make(family, tmp_path, transformers.AutoModel)
    with torch.inference_mode():
        hidden = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    for policy in POLICIES:
        with open_engine(tmp_path, **policy) as engine:
            for pooling in ("last", "mean", "cls"):
                found = engine.embed(prompts, pooling=pooling)
                for one, rows in zip(found, hidden, strict=True):
                    assert one.error == ""
                    pooled = {"last": rows[-1], "mean": rows.mean(0), "cls": rows[0]}[pooling]
                    wanted = torch.nn.functional.normalize(pooled, dim=0).numpy()
                    np.testing.assert_allclose(one.values["embedding"], wanted, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_are_those_of_transformers(family, tmp_path):
    auto = transformers.AutoModelForSequenceClassification
    model, prompts = make(family, tmp_path, auto, num_labels=3, pad_token_id=None)
    with torch.inference_mode():
        expected = [model(torch.tensor([row])).logits[0].softmax(0).numpy() for row in prompts]
    for policy in POLICIES:
        with open_engine(tmp_path, **policy) as engine:
            for one, wanted in zip(engine.classify(prompts), expected, strict=True):
                assert one.error == ""
                cells = one.values["label_probabilities"]
                np.testing.assert_allclose([c["probability"] for c in cells], wanted, atol=2e-5)
                assert one.values["label"] == f"LABEL_{wanted.argmax()}"
