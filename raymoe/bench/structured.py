"""Do structured outputs that hurt slow down the rows beside them?

Plain rows run alone and beside rows whose forms are malformed, explode or are slow to match, in
turns; what is compared is the time until the last plain row is done.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig

from raymoe.bench.hostile_forms import exploding_outputs, malformed_outputs, slow_outputs
from raymoe.bench.workloads import SHAPES
from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.engine.outputs import Generation
from raymoe.errors import ExecutionError
from raymoe.processes import stolen_s
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div

Row = tuple[str, dict[str, Any]]  # prompt, sampling parameters

PAD, BOS, EOS, AT = 0, 1, 2, 3
PROMPT_CHARACTERS = 64
HOSTILE_TOKENS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredResult:
    """Times of the plain rows.

    Attributes:
        hostile_s: Until the last hostile row was an error row too, in those runs.
        alone_stolen, beside_stolen: Share of the cores that a virtual machine's host took during
            the plain rows of each run, 0..1. Runs that differ in it tell little of the rows.
    """

    num_plain: int
    num_hostile: int
    generated_tokens: int
    alone_s: tuple[float, ...]
    beside_s: tuple[float, ...]
    hostile_s: tuple[float, ...]
    alone_stolen: tuple[float, ...]
    beside_stolen: tuple[float, ...]

    @property
    def pace(self) -> float:
        """Speed beside hostile rows over speed alone: median of the pairs."""
        pairs = zip(self.alone_s, self.beside_s, strict=True)
        return statistics.median(alone / beside for alone, beside in pairs)

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"pace": self.pace})


def hostile_forms(count: int, first_variant: int) -> list[Any]:
    """Values of `structured_outputs`: exploding, slow and malformed ones in turn.

    Those of different variants differ, so that none is known from an earlier run; but for the
    malformed ones, of which there are a dozen.
    """
    malformed = [outputs for outputs, _ in malformed_outputs()]
    forms = [
        choices[variant % len(choices)]
        for variant in range(first_variant, first_variant + ceil_div(count, 3))
        for choices in (exploding_outputs(variant), slow_outputs(variant), malformed)
    ]
    return forms[:count]


@contextmanager
def structured_engine(
    shape: str, directory: Path, *, num_rows: int, new_tokens: int, num_threads: int
) -> Iterator[Engine]:
    """An engine with random weights of a shape and a tokenizer of one token per byte."""
    config = AutoConfig.for_model(
        **SHAPES[shape], bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD
    )
    config.save_pretrained(directory)
    write_tokenizer(directory)
    lengths = ((PROMPT_CHARACTERS, new_tokens),) * num_rows
    engine_config = EngineConfig(
        dtype="bfloat16",
        device="cpu",
        load_format="dummy",
        num_threads=num_threads,
        workload=Workload.of_rows(lengths),
    )
    with Engine.from_pretrained(directory, engine_config) as engine:
        yield engine


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer without merges; "@" is a token that nothing else needs."""
    special = ("<pad>", "<s>", "</s>")
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"@"})
    vocab = {token: index for index, token in enumerate((*special, "@", *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


def compare_beside_hostile(
    engine: Engine,
    *,
    num_plain: int,
    num_hostile: int,
    new_tokens: int,
    repetitions: int,
    report: Callable[[str], None],
) -> StructuredResult:
    """Run the plain rows alone and beside the hostile ones, every other time those first.

    Raises:
        ExecutionError: A plain row has other tokens beside the hostile ones, or a hostile row does
            not end as an error row.
    """
    plain = {"max_tokens": new_tokens, "ignore_eos": True, "temperature": 1.0}
    rows = [(f"{index} ".ljust(PROMPT_CHARACTERS, "x"), plain) for index in range(num_plain)]
    _run(engine, rows[:32], [("x", {"structured_outputs": {"choice": ["a"]}})])  # warm up
    alone: list[_Run] = []
    beside: list[_Run] = []
    for repetition in range(repetitions):
        forms = hostile_forms(num_hostile, first_variant=repetition * num_hostile)
        hostile = [_hostile_row(form) for form in forms]
        pair = [(alone, []), (beside, hostile)]
        for runs, company in pair if repetition % 2 == 0 else reversed(pair):
            runs.append(_run(engine, rows, company))
            report(
                f"{repetition + 1} of {repetitions}: {num_plain} plain rows beside "
                f"{len(company)} hostile ones {runs[-1]}"
            )
        _check(alone[-1], beside[-1])
    return StructuredResult(
        num_plain=num_plain,
        num_hostile=num_hostile,
        generated_tokens=num_plain * new_tokens,
        alone_s=tuple(run.plain_s for run in alone),
        beside_s=tuple(run.plain_s for run in beside),
        hostile_s=tuple(run.total_s for run in beside),
        alone_stolen=tuple(run.stolen for run in alone),
        beside_stolen=tuple(run.stolen for run in beside),
    )


class _Run(NamedTuple):
    """What one run gave; seconds from its begin to the end of the plain rows, and of all rows."""

    plain_s: float
    total_s: float
    stolen: float
    plain: list[Generation]
    hostile: list[Generation]

    def __str__(self) -> str:
        return f"took {self.plain_s:.1f} s, the host {100 * self.stolen:.1f} % of the cores"


def _hostile_row(form: object) -> Row:
    # The slow ones end with "@": a bias against it keeps them going.
    return "x", {
        "max_tokens": HOSTILE_TOKENS,
        "logit_bias": {AT: -100.0},
        "structured_outputs": form,
    }


def _run(engine: Engine, plain: Sequence[Row], hostile: Sequence[Row]) -> _Run:
    begin_s, begin_stolen_s = time.perf_counter(), stolen_s()
    first = engine.submit(*_columns(plain[: len(plain) // 4]))
    doomed = engine.submit(*_columns(hostile))
    rest = engine.submit(*_columns(plain[len(plain) // 4 :]))
    generations = [future.result() for future in [*first, *rest]]
    plain_s = time.perf_counter() - begin_s
    stolen = (stolen_s() - begin_stolen_s) / (plain_s * (os.cpu_count() or 1))
    errors = [future.result() for future in doomed]
    return _Run(plain_s, time.perf_counter() - begin_s, stolen, generations, errors)


def _columns(rows: Sequence[Row]) -> tuple[list[str], list[dict[str, Any]]]:
    return [prompt for prompt, _ in rows], [params for _, params in rows]


def _check(alone: _Run, beside: _Run) -> None:
    pairs = zip(alone.plain, beside.plain, strict=True)
    num_changed = sum(one.token_ids != other.token_ids for one, other in pairs)
    num_kept = sum(generation.finish_reason != "error" for generation in beside.hostile)
    if num_changed or num_kept:
        raise ExecutionError(
            f"{num_changed} of {len(alone.plain)} plain rows changed beside hostile ones, and "
            f"{num_kept} of {len(beside.hostile)} hostile rows did not end as error rows"
        )
