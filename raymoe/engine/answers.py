"""Answers: their reasoning, tool calls and text, and their values under an output schema."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from raymoe.chat.parser import ChatParser
from raymoe.chat.reasoning import find_answer, opens_reasoning
from raymoe.config import SamplingParams
from raymoe.engine.outputs import Generation
from raymoe.engine.tokenizer import UNFINISHED, Chat, continued_text, find_stop
from raymoe.engine.workers.process import WorkerProcess
from raymoe.errors import ConfigError, in_step
from raymoe.output_schema import OutputSchema
from raymoe.units import GIB

WORKER = Path(__file__).parent / "workers" / "schema_worker.py"
LOAD_LIMIT_S = 60.0  # CPU time
CHECK_LIMIT_S = 1.0  # CPU time for one answer; usual ones take 1 ms
MAX_MEMORY_BYTES = GIB
Decode = Callable[[Sequence[Sequence[int]]], Sequence[str | Exception]]


def split_generation(
    parser: ChatParser,
    generation: Generation,
    prompt: object,
    params: SamplingParams,
    *,
    decode: Decode,
) -> Generation:
    """Return a generation and its samples with reasoning and tool calls apart from the text.

    Args:
        prompt: The chat, as messages or a `Chat`.
        decode: Token ids to texts, with special tokens.
    """
    continued = continued_text(prompt)
    samples = generation.outputs
    texts: Sequence[str | Exception] = [sample.text for sample in samples]
    if parser.needs_special_tokens:
        with in_step("decoding special tokens"):
            is_open = None
            if parser.reasoning is not None:
                is_open = opens_reasoning(parser.reasoning, generation.prompt_end, continued)
            texts = [
                _text_with_marks(sample, params, decode, parser=parser.reasoning, is_open=is_open)
                for sample in samples
            ]
    done = []
    for sample, text in zip(samples, texts, strict=True):
        if isinstance(text, Exception):
            done.append(Generation.from_error(text, sample.num_input_tokens))
            continue
        thought, answer, calls = parser.split(
            text,
            prompt_end=generation.prompt_end,
            continued=continued,
            tools=prompt.tools if isinstance(prompt, Chat) else (),
            is_constrained=params.structured_outputs_params is not None,
        )
        done.append(
            dataclasses.replace(sample, text=answer, reasoning=thought, tool_calls=calls, others=())
        )
    return dataclasses.replace(done[0], others=tuple(done[1:]))


def _text_with_marks(
    sample: Generation,
    params: SamplingParams,
    decode: Decode,
    *,
    parser: str | None,
    is_open: bool | None,
) -> str | Exception:
    """Decode with the special tokens that mark parts, cut as the engine cuts texts."""
    has_ended = sample.finish_reason == "stop" and not params.include_stop_str_in_output
    tokens = sample.token_ids
    whole, cut, first = decode(
        [tokens, tokens[: -1 if has_ended else None], tokens[: params.min_tokens]]
    )
    if isinstance(whole, Exception) or isinstance(first, Exception):
        return cut
    begin: int | None = 0
    if parser is not None:
        begin = find_answer(parser, whole, is_open=is_open, stop=params.stop_strings)
    if begin is None:
        return cut
    place = find_stop(
        whole,
        params.stop_strings,
        len(first.rstrip(UNFINISHED)),
        begin,
        is_included=params.include_stop_str_in_output,
    )
    return cut if place is None else whole[:place]


class AnswerReader:
    """Reads answers; thread-safe.

    An answer that followed the schema while it was generated is valid and is not checked again.
    Another, of a row with a constraint of its own, is checked in a helper process within limits,
    as patterns and answers together may need any time. It starts with the first such answer.
    """

    def __init__(self, schema: OutputSchema, check_limit_s: float = CHECK_LIMIT_S) -> None:
        self._schema, self._limit_s = schema, check_limit_s
        self._worker = WorkerProcess(
            WORKER,
            {"schema": schema.text},
            what="the check of an answer",
            load_cpu_s=LOAD_LIMIT_S,
            memory_bytes=MAX_MEMORY_BYTES,
        )

    def read(self, generation: Generation, params: SamplingParams) -> Generation:
        """Return an answer and its samples with their values.

        Args:
            params: Those that it was generated with.

        Raises:
            WorkerProcessError: The helper process was ended from outside.
            ExecutionError: This object was closed.
        """
        form = params.structured_outputs_params
        is_enforced = form is not None and form.json == self._schema.text
        with in_step("reading an answer"):
            return generation.parsed_as(self._schema, None if is_enforced else self._find_problem)

    def close(self) -> None:
        self._worker.close()

    def _find_problem(self, text: str) -> str:
        try:
            answer, _ = self._worker.ask({"text": text}, cpu_s=self._limit_s)
        except ConfigError as error:  # such as a limit: the answer stays, without a value
            return f"$: {error}"
        return str(answer["problem"])
