"""A trained checkpoint, Gemma-3 270M, against transformers in float32: every task of the engine.

Random models choose their tokens as clearly as it takes; a trained one has a real vocabulary, text
that goes on, and numbers in the range of real ones. It comes as GGUF in packages of the index, in
Q4_K_M; transformers dequantises it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import llguidance.numpy
import numpy as np
import pytest
import torch
import transformers
from llguidance import LLMatcher
from torch import Tensor

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.engine.grammars import compile_request
from raymoe.engine.outputs import Generation
from raymoe.engine.workers.grammar_worker import grammar_text, load_vocabulary
from raymoe.structured import StructuredOutputs
from tests.trained_model import save_trained, skip_without_trained

pytestmark = pytest.mark.slow
skip_without_trained()

MAX_TOKENS = 24
LONG = "The night was cold and the old road ran on between the hills. " * 48  # beyond the window
PROMPTS = (
    "The capital of France is",
    "Question: What is 17 + 25?\nAnswer:",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland ist",
    "日本の首都は",
    "Once upon a time, in a village by the sea,",
    "1, 2, 3, 4, 5,",
    LONG,
)
CONTINUATIONS = (
    " Paris.",
    " 42",
    "if n < 2:\n        return n",
    " Berlin",
    "東京です。",
    " a",
    " 6, 7",
)
CONTINUATIONS += (" The rain fell.",)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Germany", "Japan"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 40_000_000},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}
JSON_PROMPTS = (
    'Paris as JSON with the keys city, country and population: ',
    'Tokyo is the capital of Japan. As JSON: ',
    "{}",
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """The model on disk and in transformers, and prompts as tokens."""

    directory: Path
    model: Any
    prompts: list[list[int]]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    @property
    def tokenizer(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(self.directory)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        return self.model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("trained")
    model, tokenizer = save_trained(directory)
    return Trained(directory, model, [tokenizer(text).input_ids for text in PROMPTS])


@pytest.fixture(scope="module")
def engine(trained: Trained) -> Iterator[Engine]:
    with open_engine(trained) as engine:
        yield engine


def open_engine(trained: Trained, head: str = "auto") -> Engine:
    config = EngineConfig(dtype="float32", head=head, device="cpu", max_model_len=2048)
    return Engine.from_pretrained(trained.directory, config)


def assert_logprobs(found: Generation, logits: Tensor) -> None:
    """`logits` of the generated tokens, one row each."""
    wanted = logits.log_softmax(-1)
    assert found.logprobs is not None
    for entry, row in zip(found.logprobs, wanted, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-3)


def test_tokens_and_their_log_probabilities_are_those_of_transformers(
    trained: Trained, engine: Engine
) -> None:
    params = {"temperature": 0, "max_tokens": MAX_TOKENS, "logprobs": 2}
    found = engine.generate(list(PROMPTS), params)
    for prompt, generation in zip(trained.prompts, found, strict=True):
        assert generation.error == ""
        assert generation.num_input_tokens == len(prompt)
        (tokens,) = trained.model.generate(
            torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False
        ).tolist()
        assert list(generation.token_ids) == tokens[len(prompt) :]
        assert_logprobs(generation, trained.logits(tokens)[len(prompt) - 1 : -1])
    text = trained.tokenizer.decode(found[0].token_ids, skip_special_tokens=True)
    assert found[0].text == text
    assert "France" in text


def test_json_is_that_of_transformers_with_the_same_masks(trained: Trained, engine: Engine) -> None:
    outputs = StructuredOutputs.of({"json": SCHEMA})
    params = {"temperature": 0, "max_tokens": 64, "logprobs": 0, "structured_outputs": outputs}
    found = engine.generate(list(JSON_PROMPTS), params)
    for text, generation in zip(JSON_PROMPTS, found, strict=True):
        assert (generation.error, generation.finish_reason) == ("", "stop")
        jsonschema.validate(json.loads(generation.text), SCHEMA)
        tokens = trained.tokenizer(text).input_ids
        wanted, logits = constrained(trained, tokens, outputs)
        assert list(generation.token_ids) == wanted
        assert_logprobs(generation, logits)


def constrained(
    trained: Trained, tokens: list[int], outputs: StructuredOutputs
) -> tuple[list[int], Tensor]:
    """Greedy tokens of transformers among those that the grammar allows, and their raw logits."""
    config = trained.model.config
    vocabulary = load_vocabulary(str(trained.directory), config.vocab_size, [config.eos_token_id])
    matcher = LLMatcher(vocabulary, grammar_text(**compile_request(outputs)))
    mask = llguidance.numpy.allocate_token_bitmask(1, vocabulary.vocab_size)
    generated: list[int] = []
    while not generated or generated[-1] != config.eos_token_id:
        llguidance.numpy.fill_next_token_bitmask(matcher, mask)
        allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: config.vocab_size]
        row = trained.logits([*tokens, *generated])[-1]
        generated.append(int(row.masked_fill(~torch.tensor(allowed).bool(), -torch.inf).argmax()))
        matcher.consume_token(generated[-1])
    return generated, trained.logits([*tokens, *generated])[len(tokens) - 1 : -1]


def test_scores_are_those_of_transformers(trained: Trained, engine: Engine) -> None:
    ends = [trained.encode(text) for text in CONTINUATIONS]
    found = engine.score(trained.prompts, ends, token_logprobs=True)
    for prompt, end, one in zip(trained.prompts, ends, found, strict=True):
        assert one.error == ""
        logprobs = trained.logits([*prompt, *end])[len(prompt) - 1 : -1].log_softmax(-1)
        wanted = logprobs.gather(1, torch.tensor(end)[:, None])[:, 0].numpy()
        assert one.values is not None
        np.testing.assert_allclose(one.values["token_logprobs"], wanted, atol=2e-3)


def test_embeddings_are_those_of_transformers(trained: Trained) -> None:
    with open_engine(trained, head="none") as engine, torch.inference_mode():
        for pooling in ("last", "mean"):
            found = engine.embed(trained.prompts, pooling=pooling)
            for prompt, one in zip(trained.prompts, found, strict=True):
                assert one.error == ""
                hidden = trained.model.model(torch.tensor([prompt])).last_hidden_state[0]
                row = hidden[-1] if pooling == "last" else hidden.mean(0)
                wanted = torch.nn.functional.normalize(row, dim=0).numpy()
                assert one.values is not None
                np.testing.assert_allclose(one.values["embedding"], wanted, atol=1e-4)
