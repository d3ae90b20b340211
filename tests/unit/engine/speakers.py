"""Engines whose model thinks before it answers, in the words of several families."""

import dataclasses
import json
import re
from pathlib import Path

import torch

from raymoe.config import EngineConfig
from raymoe.data.generator import MoEGenerator
from raymoe.engine.engine import Engine
from raymoe.engine.tokenizer import Tokenizer
from raymoe.specs.files import read_chat_template
from tests.unit.engine.fakes import (
    EOS,
    VOCAB_SIZE,
    FakeRunner,
    fake_parts,
    small_policy,
    write_byte_tokenizer,
)

# The thoughts have what stop strings and schemas look for, and so does the answer.
THOUGHTS, ANSWER = '7;{"a"', "6;x"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What a family writes.

    Attributes:
        marks: Its tokens for the parts of answers.
        are_special: Whether texts leave them out.
        start: What its template ends with.
        says: What the model says after it.
    """

    marks: tuple[str, ...]
    start: str
    says: str
    are_special: bool = True

    def ids(self, text: str) -> list[int]:
        pattern = f"({'|'.join(map(re.escape, self.marks))})"
        return [
            token
            for part in re.split(pattern, text)
            for token in (
                [VOCAB_SIZE + self.marks.index(part)] if part in self.marks else part.encode()
            )
        ]


HARMONY = {
    "marks": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    "start": "<|start|>assistant",
}
HARMONY_THOUGHTS = f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant"
FAMILIES = {
    "gpt-oss": Family(
        **HARMONY, says=f"{HARMONY_THOUGHTS}<|channel|>final <|constrain|>json<|message|>{ANSWER}"
    ),
    "gpt-oss without a form": Family(
        **HARMONY, says=f"{HARMONY_THOUGHTS}<|channel|>final<|message|>{ANSWER}"
    ),
    "gpt-oss without a space": Family(
        **HARMONY, says=f"{HARMONY_THOUGHTS}<|channel|>final<|constrain|>json<|message|>{ANSWER}"
    ),
    "gpt-oss with a form in words": Family(
        **HARMONY, says=f"{HARMONY_THOUGHTS}<|channel|>final json<|message|>{ANSWER}"
    ),
    "Mistral": Family(
        marks=("[INST]", "[/INST]", "[THINK]", "[/THINK]"),
        start="[/INST]",
        says=f"[THINK]{THOUGHTS}[/THINK]{ANSWER}",
    ),
    "opened by the template": Family(
        marks=("<think>", "</think>"),
        start="<think>\n",
        says=f"{THOUGHTS}\n</think>\n\n{ANSWER}",
        are_special=False,
    ),
    "a token that thinks": Family(
        marks=("<think>", "</think>"),
        start="",
        says=f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}",
        are_special=False,
    ),
}


class Speaker(FakeRunner):
    """A model that says what its family says; where it may not, the first token that it may."""

    def __init__(self, family: Family, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._size = VOCAB_SIZE + len(family.marks)
        self._says, self._start = family.ids(family.says), family.ids(family.start)

    def _logits(self, context) -> torch.Tensor:
        tokens = context.tolist()
        said = tokens[tokens.index(ord("^")) + 1 + len(self._start) :]
        is_in_words = said == self._says[: len(said)] and len(said) < len(self._says)
        logits = torch.arange(self._size) / self._size  # braces before spaces
        logits[self._says[len(said)] if is_in_words else EOS] = 5
        return logits


def write_tokenizer(directory: Path, family: Family) -> Path:
    write_byte_tokenizer(directory, family.marks)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] &= family.are_special or token["content"] not in family.marks
    path.write_text(json.dumps(tokenizer))
    path = directory / "tokenizer_config.json"
    shown = "{{ messages[0].content }}^" + family.start + "{# " + " ".join(family.marks) + " #}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": shown}))
    return directory


def open_engine(directory: Path, family: Family, config: EngineConfig) -> Engine:
    policy = small_policy()
    size = VOCAB_SIZE + len(family.marks)
    parts = fake_parts(Speaker(family, policy.num_kv_blocks), policy, directory=directory)
    parts = dataclasses.replace(parts, tokenizer=Tokenizer(directory, size), vocab_size=size)
    return Engine(parts, config)


class SpeakingGenerator(MoEGenerator):
    def __init__(self, directory: Path, family: Family, **options: object) -> None:
        self._family = family
        super().__init__(directory, **options)

    def _open_engine(self, model_source, config: EngineConfig) -> Engine:
        self._template = read_chat_template(Path(model_source))
        return open_engine(Path(model_source), self._family, config)
