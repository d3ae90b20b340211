"""Templates that make the prompts of rows from their columns.

A stage of tables before the operator: it adds one column with the prompts or the messages, which
stays in the output, and the reasons of rows that have none to the column of input errors.
"""

import atexit
import dataclasses
import functools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from raymoe.data.rows import (
    NO_COLUMN,
    BadCell,
    RowError,
    as_text,
    both_given,
    check_encodes,
    decode,
    read_cells,
    read_messages,
    read_prompt,
    refuse_bad_cell,
)
from raymoe.download.models import find_files
from raymoe.engine.tokenizer import (
    CHAT_LOAD_LIMIT_S,
    CHAT_MAX_MEMORY_BYTES,
    MAX_CHARACTERS,
    split_batches,
)
from raymoe.engine.tokenizer import RENDER_LIMIT_S as ROW_LIMIT_S
from raymoe.engine.workers.process import WorkerProcess
from raymoe.errors import ConfigError, UnknownOptionError, WorkerProcessError, describe
from raymoe.specs.files import read_chat_template, read_own_json, read_text

PROMPTS_COLUMN, MESSAGES_COLUMN = "rendered_prompt", "rendered_messages"
INPUT_ERROR_COLUMN = "__input_error__"
WORKER = Path(__file__).parent.parent / "engine" / "workers" / "prompt_worker.py"
ROW = "row"
TEMPLATES = ("prompt_template", "system_prompt")
MAX_NAME = 256  # of a file
MAX_BATCH_CHARACTERS = 8_000_000
SYSTEM_ROLES = ("system", "developer")

Row = dict[str, Any]


def read_json_schema(value: object, *, what: str = "json_schema") -> Any:
    """Return a JSON schema, or the one in the file of this path.

    Raises:
        ConfigError: The file cannot be read, or has no JSON.
    """
    if isinstance(value, str | Path):
        return read_own_json(Path(value), what=what)
    return value


def read_template(text: str, option: str) -> str:
    """Return a template that is given as text, or as @FILE.

    Raises:
        ConfigError: The file cannot be read, or the text is the name of one.
    """
    if text.startswith("@"):
        return read_text(Path(text[1:]), what=option)
    if "{" not in text and "\n" not in text and len(text) < MAX_NAME and Path(text).is_file():
        raise ConfigError(f"{option} is {text!r}, the name of a file; did you mean '@{text}'?")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate:
    """What the prompts or messages of rows are made of.

    Attributes:
        prompt: Jinja over the columns of a row; None takes the row's own prompt or messages.
        system: Jinja over the columns, the message before the prompt; "" makes messages without
            one, None makes no messages.
        json_columns: Columns of JSON text, which templates see as values.
        column_prefix: Precedes the name of the column that is added, as in the operator.
    """

    prompt: str | None = None
    system: str | None = None
    prompt_column: str = "prompt"
    messages_column: str = "messages"
    error_column: str = INPUT_ERROR_COLUMN
    json_columns: frozenset[str] = frozenset()
    column_prefix: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any], **columns: str) -> "PromptTemplate":
        """Return the template of the options `TEMPLATES`, each of which is text or @FILE.

        Raises:
            ConfigError: It is no text, or the file cannot be read.
        """
        sources = {}
        for name in TEMPLATES:
            value = options.get(name)
            if value is not None and not isinstance(value, str):
                kind = type(value).__name__
                raise ConfigError(f"{name} is a {kind}; it takes text, a Jinja template")
            sources[name] = None if value is None else read_template(value, name)
        template = cls(prompt=sources["prompt_template"], system=sources["system_prompt"])
        return dataclasses.replace(template, **columns)  # type: ignore[arg-type]

    @property
    def output_column(self) -> str:
        name = PROMPTS_COLUMN if self.system is None else MESSAGES_COLUMN
        return self.column_prefix + name

    @property
    def operator_columns(self) -> dict[str, str]:
        """The columns that the operator reads after this."""
        names = {"prompt_column": NO_COLUMN, "messages_column": NO_COLUMN}
        name = "prompt_column" if self.system is None else "messages_column"
        return names | {name: self.output_column}

    @property
    def sources(self) -> dict[str, str]:
        """The templates that there are."""
        given = {"prompt": self.prompt, "system": self.system}
        return {name: source for name, source in given.items() if source is not None}

    def check(self, names: Collection[str]) -> None:
        """Refuse a template that rows with these columns cannot have.

        Raises:
            ConfigError: It is no Jinja, names a column that is not there, or the input has the
                column that would be added.
        """
        if self.output_column in names:
            raise ConfigError(f"the input has a column {self.output_column!r}, which the prompt "
                              "template adds; rename it")  # fmt: skip
        own = {self.prompt_column, self.messages_column}
        if self.prompt is None and not own & {*names}:
            have = ", ".join(map(repr, names)) or "no columns"
            raise ConfigError(
                f"neither column {self.prompt_column!r} nor {self.messages_column!r} exists; the "
                f"table has {have}; set prompt_column or messages_column, or a prompt_template"
            )
        for name in self.sources:
            self._check_source(name, names)

    def check_model(self, model_source: str | Path) -> None:
        """Refuse to make chats for a model that is here and has no chat template."""
        directory = None if self.system is None else find_files(model_source)
        if directory is not None and not read_chat_template(directory):
            raise ConfigError(f"system_prompt makes chats, and {directory.name} has no chat "
                              "template; write it into a prompt_template")  # fmt: skip

    def columns(self, names: Collection[str]) -> list[str]:
        """Return which of these columns are needed, the one of errors included."""
        if any(facts["reads_all"] for facts in self._facts().values()) and ROW not in names:
            return [*names]
        needed = {self.error_column}
        if self.prompt is None:
            needed |= {self.prompt_column, self.messages_column}
        for facts in self._facts().values():
            needed |= {*facts["names"], *facts["keys"]}
            needed |= {ROW} if facts["reads_row"] else set()
        return [name for name in names if name in needed]

    def apply(self, table: pa.Table) -> pa.Table:
        """Return the rows with the column of prompts or messages, and the column of errors."""
        names = [name for name in self.columns(table.column_names) if name != self.error_column]
        cells = [self._cells(table, name) for name in names]
        rows = [dict.fromkeys(self._absent(names)) for _ in range(table.num_rows)]
        for name, column in zip(names, cells, strict=True):
            for row, cell in zip(rows, column, strict=True):
                row[name] = cell
        errors = [self._own_error(cell) for cell in read_cells(table, self.error_column)]
        good = [index for index, error in enumerate(errors) if not error]
        results: list[str | None] = [None] * table.num_rows
        for index, result in zip(good, self._render([rows[i] for i in good]), strict=True):
            if isinstance(result, Exception):
                errors[index] = _reason(result)
            else:
                results[index] = result
        if self.error_column in table.column_names:
            table = table.drop_columns([self.error_column])
        table = table.append_column(self.output_column, pa.array(results, pa.string()))
        return table.append_column(self.error_column, pa.array(errors, pa.string()))

    def _cells(self, table: pa.Table, name: str) -> list[Any]:
        cells = read_cells(table, name)
        if name not in self.json_columns:
            return cells
        return [json.loads(cell) if isinstance(cell, str) else cell for cell in cells]

    def _absent(self, names: Collection[str]) -> set[str]:
        """Return columns that a block may lack because all its rows have null there."""
        read = {one for facts in self._facts().values() for one in _columns_of(facts)}
        return read - {*names}

    def _own_error(self, cell: Any) -> str:
        return cell.reason if isinstance(cell, BadCell) else cell or ""

    def _facts(self) -> Mapping[str, Any]:
        return _facts(self.prompt, self.system)

    def _check_source(self, name: str, names: Collection[str]) -> None:
        facts, option = self._facts()[name], _option(name)
        if "problem" in facts:
            raise ConfigError(f"{option} is no Jinja template: {facts['problem']}")
        if ROW in names:  # a column, whose own keys are read
            facts = facts | {"keys": []}
        missing = sorted({*_columns_of(facts), *facts["keys"]} - {*names})
        if missing:
            raise UnknownOptionError(missing[0], names, f"column in {option}")

    def _render(self, rows: Sequence[Row]) -> Iterator[str | Exception]:
        if not self.sources:
            yield from (self._assembled(row, {}) for row in rows)
            return
        sizes = [*map(_num_characters, rows)]
        for batch in split_batches(rows, sizes, MAX_BATCH_CHARACTERS):
            for row, texts in zip(batch, self._texts(batch), strict=True):
                yield texts if isinstance(texts, Exception) else self._assembled(row, texts)

    def _assembled(self, row: Row, texts: Mapping[str, str]) -> str | Exception:
        """Return the prompt, or JSON text of the messages."""
        try:
            if self.system is None:
                text = texts["prompt"]
                if not text:
                    raise ConfigError("prompt_template: the prompt is empty")
            else:
                text = json.dumps(self._messages(row, texts), ensure_ascii=False)
            check_encodes(text, self.output_column)
            return text
        except Exception as error:  # whatever is in a row is the row's error
            return error

    def _messages(self, row: Row, texts: Mapping[str, str]) -> list[Row]:
        system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
        if self.prompt is not None:
            return [*system, {"role": "user", "content": texts["prompt"]}]
        prompt, messages = row.get(self.prompt_column), row.get(self.messages_column)
        if self.prompt_column == self.messages_column:
            prompt = None
        if messages is not None and prompt is not None:
            raise both_given(self.prompt_column, self.messages_column)
        if messages is not None:
            chat = read_messages(messages, self.messages_column)
            if system and chat[0]["role"] in SYSTEM_ROLES:
                raise RowError("ValueError", self.messages_column, "has a system message, and so "
                               "has the job; a row takes one of them")  # fmt: skip
            return [*system, *chat]
        if prompt is None:
            raise RowError("ValueError", self.prompt_column, "is null")
        text = read_prompt(prompt, self.prompt_column)
        if not isinstance(text, str):
            raise RowError("TypeError", self.prompt_column, "has token ids; a system prompt needs "
                           "text")  # fmt: skip
        return [*system, {"role": "user", "content": text}]

    def _texts(self, rows: Sequence[Row]) -> list[Mapping[str, str] | Exception]:
        """Render rows at once; those of a request that is ended by its limits one by one."""
        results: list[Mapping[str, str] | Exception] = [ConfigError("no text")] * len(rows)
        good = []
        for index, row in enumerate(rows):
            problem = _bad_cell(row)
            if problem is None:
                good.append(index)
            else:
                results[index] = problem
        try:
            found = self._ask([rows[index] for index in good])
        except (ConfigError, WorkerProcessError) as error:
            one_by_one = ([rows[index]] for index in good)
            found = [error] if len(good) == 1 else [self._texts(one)[0] for one in one_by_one]
        for index, one in zip(good, found, strict=True):
            results[index] = one
        return results

    def _ask(self, rows: Sequence[Row]) -> list[Mapping[str, str] | Exception]:
        if not rows:
            return []
        plain = json.loads(json.dumps(list(rows), default=as_text))
        request = {"templates": self.sources, "rows": plain}
        answer, _ = _worker().ask(request, cpu_s=ROW_LIMIT_S)
        return [_texts_of(one) for one in answer["rows"]]


def _columns_of(facts: Mapping[str, Any]) -> set[str]:
    """Return the columns that a template reads by their names."""
    return {*facts["names"]} - {*facts["globals"]}


def _option(name: str) -> str:
    return "prompt_template" if name == "prompt" else "system_prompt"


def _texts_of(answer: Mapping[str, Any]) -> Mapping[str, str] | Exception:
    if "texts" in answer:
        return dict(answer["texts"])
    return ConfigError(f"{_option(answer['failed'])}: {answer['reason']}")


def _bad_cell(row: Row) -> Exception | None:
    for name, cell in row.items():
        try:
            refuse_bad_cell(cell, name)
            if isinstance(cell, bytes):
                decode(cell, name)
        except RowError as error:
            return error
    return None


def _reason(error: Exception) -> str:
    """Return the error without its type where it is one of ours: the operator adds one."""
    if isinstance(error, RowError):
        return str(error).partition(": ")[2]
    return str(error) if isinstance(error, ConfigError) else describe(error)


def _num_characters(row: Row) -> int:
    return sum(len(cell) for cell in row.values() if isinstance(cell, str | bytes))


@functools.cache
def _worker() -> WorkerProcess:
    """Return this process's helper, which keeps the templates that it has compiled."""
    worker = WorkerProcess(
        WORKER,
        {"max_characters": MAX_CHARACTERS},
        what="the prompt template",
        load_cpu_s=CHAT_LOAD_LIMIT_S,
        memory_bytes=CHAT_MAX_MEMORY_BYTES,
    )
    atexit.register(worker.close)
    return worker


@functools.lru_cache(maxsize=64)
def _facts(prompt: str | None, system: str | None) -> Mapping[str, Any]:
    """Return what the templates read, by their names."""
    sources = {"prompt": prompt, "system": system}
    given = {name: source for name, source in sources.items() if source is not None}
    return _worker().ask({"templates": given}, cpu_s=ROW_LIMIT_S)[0]
