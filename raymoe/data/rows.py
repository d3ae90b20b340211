"""Conversion of table rows to requests, with a reason for cells that cannot be read."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from raymoe.config import INTEGER_RANGES, SamplingParams, as_sampling_params
from raymoe.data.batches import as_identity, column_names, num_rows, plain_cell, plain_cells
from raymoe.engine.tokenizer import WITHOUT_CONTENT, Chat
from raymoe.errors import TEMPORARY_ERRORS, ConfigError, describe
from raymoe.safe_text import MAX_LEVELS, nesting_problem

MAX_SHOWN_CHARACTERS = 60
# A reason, and a place whose path has 4,096 characters: a resumed run knows broken lines by both.
MAX_OWN_ERROR = 5000

# UnicodeDecodeError is a ValueError; maps with lists as keys raise TypeError.
_UNREADABLE = (ValueError, KeyError, OverflowError, TypeError)


class RowError(Exception):
    """Why one row cannot be generated; `kind` is the error type in the error column."""

    def __init__(self, kind: str, column: str, reason: str) -> None:
        super().__init__(f"{kind}: column {column!r} {reason}")


@dataclass(frozen=True, slots=True)
class BadCell:
    """A cell that Arrow holds and Python cannot read."""

    kind: str
    reason: str


def read_cells(batch: Any, column: str | None) -> list[Any]:
    """Return the cells of a column as Python values; all None if it does not exist."""
    if column is None or column not in column_names(batch):
        return [None] * num_rows(batch)
    if not isinstance(batch, pa.Table):
        return _cells_outside_arrow(batch[column])
    return _cells_of_arrow(batch.column(column))


def _cells_outside_arrow(values: Any) -> list[Any]:
    try:
        return plain_cells(values)
    except (RecursionError, *_UNREADABLE):
        return [_cell_outside_arrow(value) for value in values]


def _cell_outside_arrow(value: Any) -> Any:
    try:
        return plain_cell(value)
    except RecursionError:
        return BadCell("ValueError", f"is nested more than {MAX_LEVELS} levels deep")
    except _UNREADABLE as error:
        return BadCell(type(error).__name__, f"cannot be read: {shown(str(error))}")


def _cells_of_arrow(array: pa.ChunkedArray) -> list[Any]:
    if _is_too_deep(array.type):
        bad = BadCell("ValueError", f"has a type nested more than {MAX_LEVELS} levels deep")
        return [bad if scalar.is_valid else None for scalar in array]
    try:
        return list(array.to_pylist(maps_as_pydicts="strict"))
    except _UNREADABLE:
        return [_cell(scalar) for scalar in array]


def _is_too_deep(kind: pa.DataType) -> bool:
    level = [kind]
    for _ in range(MAX_LEVELS + 1):
        inner = [getattr(one, "storage_type", one) for one in level]
        level = [one.field(i).type for one in inner for i in range(one.num_fields)]
        if not level:
            return False
    return True


def _cell(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except UnicodeDecodeError as error:
        kind = type(error).__name__
        return BadCell(kind, f"is not UTF-8: {error.reason} at byte {error.start}")
    except _UNREADABLE as error:
        return BadCell(type(error).__name__, f"cannot be read: {shown(str(error))}")


def refuse_bad_cell(value: Any, column: str) -> None:
    """Raise `RowError` for a cell that cannot be read or is nested too deeply."""
    if isinstance(value, BadCell):
        raise RowError(value.kind, column, value.reason)
    problem = nesting_problem(value)
    if problem:
        raise RowError("ValueError", column, problem)


def decode(value: bytes, column: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: {error.reason} at byte {error.start}"
        raise RowError("UnicodeDecodeError", column, reason) from error


def check_encodes(value: str, column: str) -> None:
    """Refuse lone surrogates: JSON can write them, UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        reason = f"has a lone surrogate at character {error.start}"
        raise RowError("UnicodeEncodeError", column, reason) from error


def content_digest(cells: Iterable[Any]) -> str:
    """Digest cells such that a row and any file format that holds it agree."""
    text = json.dumps([without_nulls(cell) for cell in cells], sort_keys=True, default=as_text)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def as_text(value: Any) -> Any:
    """Convert a value that JSON cannot hold."""
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def parse_json(text: str, column: str) -> Any:
    try:
        value = json.loads(text)
    except RecursionError as error:
        reason = f"is nested more than {MAX_LEVELS} levels deep: {shown(text)}"
        raise RowError("ValueError", column, reason) from error
    except ValueError as error:
        reason = f"is not JSON: {error} in {shown(text)}"
        raise RowError("ValueError", column, reason) from error
    refuse_bad_cell(value, column)
    return value


def without_nulls(value: Any) -> Any:
    """Drop the keys that Arrow added because another row of the block has them."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def shown(value: object, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    """Format a value for an error message, cut to `limit` characters."""
    try:
        text = value if isinstance(value, str) and limit > MAX_SHOWN_CHARACTERS else repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a very long integer"
    return text if len(text) <= limit else text[: limit - 3] + "..."


SAMPLING_COLUMN, TEMPLATE_COLUMN = "sampling_params", "chat_template_kwargs"
# In the place of a column's name where something before the operator makes the other column.
NO_COLUMN = "__no_prompt__"
Prompt = str | list[int] | list[dict[str, Any]] | Chat

_KEYS_WITH_A_COLUMN = ("logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """One row, ready for the engine, or the reason why it is not.

    Attributes:
        column: The column of the prompt; errors of the engine name it.
        row_id: What is in the column of ids; None without one.
        row_key: Seeds the random numbers of the row; None lets the engine choose.
        occurrence: How many equal rows without a key the job had before this one.
        error: "Type: message", or "" if the row is fine; then `prompt` or `cells` is not None.
        continuations: What a task scores after the prompt, which is then empty for a document.
        cells: All of the row, by column, for a rollout; structs have no fields that are null.
    """

    prompt: Prompt | None
    sampling_params: SamplingParams
    column: str
    row_id: Any = None
    row_key: int | None = None
    occurrence: int = 0
    error: str = ""
    continuations: tuple[str | list[int], ...] | None = None
    cells: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader:
    """Converts tables to requests.

    Attributes:
        defaults: Parameters of every row; column `sampling_params` overrides them key by key.
        id_column: Its values become row keys.
        error_column: Rows with text in it become error rows with that text.
        has_choices: Whether the output has a column for all samples and their log probabilities.
        has_request: Whether it has one for their log probabilities and those of prompts.
        chat_template_kwargs: Of all rows of messages; the column of this name overrides them.
        is_rollout: Whether a function takes the whole row, in the place of a prompt.
    """

    defaults: SamplingParams
    prompt_column: str = "prompt"
    messages_column: str = "messages"
    id_column: str | None = None
    tools_column: str | None = None
    error_column: str | None = None
    has_choices: bool = False
    has_request: bool = False
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_rollout: bool = False

    @classmethod
    def of_options(cls, options: Mapping[str, Any], **changes: Any) -> "RowReader":
        """Return the reader of a `MoEGenerator` with these options."""
        defaults = as_sampling_params(options.get("sampling_params")).override(changes)
        names = [field.name for field in dataclasses.fields(cls) if field.name != "defaults"]
        given = {name: options[name] for name in names if options.get(name) is not None}
        return cls(defaults=defaults, is_rollout=options.get("rollout") is not None, **given)

    def check_schema(self, schema: pa.Schema) -> None:
        self.check_columns(schema.names)

    def check_columns(self, names: Sequence[str]) -> None:
        """Refuse rows without the columns that were named.

        Raises:
            ConfigError: There is neither a prompt nor messages, or a named column is missing.
        """
        have = f"the rows have {', '.join(map(repr, names)) or 'no columns'}"
        if not self.is_rollout and not {*names} & {self.prompt_column, self.messages_column}:
            raise ConfigError(f"{self._missing()}; {have}; {self._advice()}")
        for option in ("id_column", "tools_column", "error_column"):
            name = getattr(self, option)
            if name is not None and name not in names:
                raise ConfigError(f"{option} {name!r} does not exist; {have}")

    @property
    def _text_column(self) -> str | None:
        """The column of prompts: one that is named for messages is none."""
        return None if self.prompt_column == self.messages_column else self.prompt_column

    @property
    def _only_column(self) -> str:
        is_chat = self.prompt_column == NO_COLUMN
        return self.messages_column if is_chat else self.prompt_column

    def _missing(self) -> str:
        if NO_COLUMN in {self.prompt_column, self.messages_column}:
            return f"no column {self._only_column!r} exists"
        return f"neither column {self.prompt_column!r} nor {self.messages_column!r} exists"

    def _advice(self) -> str:
        if self.prompt_column == NO_COLUMN:
            return (
                "return it from preprocess, or give chat_template_stage=False where rows have a "
                "'prompt' and no messages"
            )
        if self.messages_column == NO_COLUMN:
            return (
                "return it from preprocess, or leave out chat_template_stage=False where rows have "
                "'messages'"
            )
        return "set prompt_column or messages_column"

    def read(self, table: Any) -> list[RowRequest]:
        """Return one request for each row of a batch, in order; never raises for a row."""
        rows = zip(
            read_cells(table, self._text_column),
            read_cells(table, self.messages_column),
            read_cells(table, SAMPLING_COLUMN),
            read_cells(table, self.id_column),
            read_cells(table, self.tools_column),
            read_cells(table, self.error_column),
            read_cells(table, TEMPLATE_COLUMN),
            strict=True,
        )
        requests = [self._read_row(_Row(*row)) for row in rows]
        return _with_cells(requests, table) if self.is_rollout else requests

    def _read_row(self, row: "_Row") -> RowRequest:
        request = RowRequest(
            prompt=None,
            sampling_params=self.defaults,
            column=self.messages_column if row.prompt is None else self.prompt_column,
        )
        try:
            if not isinstance(row.row_id, BadCell):  # such rows have no key
                refuse_bad_cell(row.row_id, str(self.id_column))
            key = row_key(row.row_id)
            request = dataclasses.replace(request, row_id=row.row_id, row_key=key)
            refuse_bad_cell(row.error, str(self.error_column))
            if row.error:
                return dataclasses.replace(request, error=own_error(row.error))
            prompt = None if self.is_rollout else self._read_prompt(row)
            sampling_params = self._read_params(row.params)
        except RowError as error:
            return dataclasses.replace(request, error=str(error))
        except Exception as error:  # whatever is in a cell is the row's error
            return dataclasses.replace(request, error=describe(error))
        return dataclasses.replace(request, prompt=prompt, sampling_params=sampling_params)

    def _read_prompt(self, row: "_Row") -> Prompt:
        prompt, messages = row.prompt, row.messages
        if prompt is None and messages is None:
            if self._text_column is None or NO_COLUMN in {self.prompt_column, self.messages_column}:
                raise RowError("ValueError", self._only_column, "is null")
            other = f"and column {self.messages_column!r} has no messages"
            raise RowError("ValueError", self.prompt_column, f"is null {other}")
        if prompt is not None and messages is not None:
            raise both_given(self.prompt_column, self.messages_column)
        if prompt is not None:
            return read_prompt(prompt, self.prompt_column)
        chat = read_messages(messages, self.messages_column)
        kwargs = dict(self.chat_template_kwargs)
        if row.template_kwargs is not None:
            kwargs |= _read_options(row.template_kwargs, TEMPLATE_COLUMN)
        if row.tools is None and not kwargs:
            return chat
        tools = () if row.tools is None else read_tools(row.tools, str(self.tools_column))
        return Chat(chat, tools, kwargs)

    def _read_params(self, cell: Any) -> SamplingParams:
        if cell is None:
            return self.defaults
        options = _read_options(cell, SAMPLING_COLUMN)
        try:
            params = self.defaults.override(options)
        except ConfigError as error:
            raise RowError(type(error).__name__, SAMPLING_COLUMN, f"has {error}") from error
        if self.is_rollout:
            return params
        if params.n > 1 and self.defaults.n == 1 and not self.has_choices:
            if self.has_request:  # ray.data.llm drops all samples but the first
                return dataclasses.replace(params, n=1)
            raise _needs_default("n", f"n {params.n}")
        if self.has_request:
            return params
        for key in ("prompt_logprobs",) if self.has_choices else _KEYS_WITH_A_COLUMN:
            if getattr(params, key) is not None and getattr(self.defaults, key) is None:
                raise _needs_default(key, key)
        return params


def _with_cells(requests: list[RowRequest], table: Any) -> list[RowRequest]:
    """Give rows all of their cells; one with a cell that cannot be read becomes an error row."""
    names = column_names(table)
    rows = zip(*(read_cells(table, name) for name in names), strict=True)
    return [_with_row(request, names, row) for request, row in zip(requests, rows, strict=True)]


def _with_row(request: RowRequest, names: Sequence[str], row: Sequence[Any]) -> RowRequest:
    cells = dict(zip(names, row, strict=True))
    try:
        for name, cell in cells.items():
            refuse_bad_cell(cell, name)
    except RowError as error:
        return dataclasses.replace(request, column="", error=request.error or str(error))
    # Another row of the block must not change what this one is.
    cells = {name: without_nulls(cell) for name, cell in cells.items()}
    return dataclasses.replace(request, column="", cells=cells)


def own_error(value: Any) -> str:
    """Return the error of a row that something before the operator has found to be at fault."""
    text = shown(value, MAX_OWN_ERROR)
    return text if text.startswith(TEMPORARY_ERRORS) else f"ValueError: {text}"


class _Row(NamedTuple):
    prompt: Any
    messages: Any
    params: Any
    row_id: Any
    tools: Any
    error: Any
    template_kwargs: Any


def row_key(row_id: Any) -> int | None:
    """Return 63 bits that depend on the value and its type only; None for no id."""
    if row_id is None or isinstance(row_id, BadCell):
        return None
    row_id = as_identity(row_id)
    text = f"{type(row_id).__name__}:{row_id}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def both_given(prompt_column: str, messages_column: str) -> RowError:
    reason = (
        f"has a prompt and column {messages_column!r} has messages; a row takes one of them: set "
        "prompt_column or messages_column to a name that no column has, such as 'none'"
    )
    return RowError("ValueError", prompt_column, reason)


def read_prompt(value: Any, column: str) -> str | list[int]:
    """Return the text or the token ids of a cell; raises `RowError` for anything else."""
    refuse_bad_cell(value, column)
    if isinstance(value, bytes):
        value = decode(value, column)
    if hasattr(value, "tolist"):  # a tensor column
        value = value.tolist()
    if not value and isinstance(value, str | list):
        raise RowError("ValueError", column, "is empty")
    if isinstance(value, str):
        check_encodes(value, column)
        return value
    if not isinstance(value, list):
        found = f"is {shown(value)} ({type(value).__name__})"
        raise RowError("TypeError", column, f"{found}; it takes text or a list of token ids")
    if isinstance(value[0], dict):
        reason = "has a list of objects; if they are messages, name it by messages_column"
        raise RowError("TypeError", column, reason)
    for position, token in enumerate(value):
        if type(token) is not int or token < 0:
            where = f"has {shown(token)} at position {position}"
            raise RowError("TypeError", column, f"{where}; token ids are whole numbers from 0")
    return value


def read_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the chat messages of a cell: a list of structs, or the JSON text of one."""
    refuse_bad_cell(value, column)
    if isinstance(value, bytes):
        value = decode(value, column)
    # Nulls in JSON text are intended, such as those in the arguments of a tool call.
    value = parse_json(value, column) if isinstance(value, str) else without_nulls(value)
    if not isinstance(value, list):
        raise RowError("TypeError", column, f"is {shown(value)}; it takes a list of messages")
    if not value:
        raise RowError("ValueError", column, "is empty")
    for position, message in enumerate(value):
        problem = _message_problem(message)
        if problem:
            raise RowError("ValueError", column, f"message {position} {problem}")
    _check_is_json(value, column)
    return value


def read_tools(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the tools of a cell: a list of structs with type and function, or its JSON text."""
    refuse_bad_cell(value, column)
    if isinstance(value, bytes):
        value = decode(value, column)
    value = parse_json(value, column) if isinstance(value, str) else without_nulls(value)
    if not isinstance(value, list) or not all(_is_tool(tool) for tool in value):
        form = '{"type": "function", "function": {"name": ...}}'
        raise RowError("ValueError", column, f"is {shown(value)}; it takes a list of {form}")
    _check_is_json(value, column)
    return value


def _check_is_json(value: Any, column: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise RowError("UnicodeEncodeError", column, f"has a lone surrogate: {error}") from error
    except (TypeError, ValueError) as error:
        reason = f"cannot be written as JSON: {error}"
        raise RowError(type(error).__name__, column, reason) from error


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _message_problem(message: Any) -> str:
    if not isinstance(message, dict):
        return f"is {shown(message)}; it takes an object with role and content"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        return f"has the role {shown(role)}; it takes text such as 'user'"
    if content is None and not any(message.get(name) for name in WITHOUT_CONTENT):
        return "has no content"
    if not isinstance(content, str | list | None):
        return f"has the content {shown(content)}; it takes text or a list of text parts"
    parts = content if isinstance(content, list) else []
    wrong = [part for part in parts if not _is_text_part(part)]
    return f"has the part {shown(wrong[0])}; only text parts are supported" if wrong else ""


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, dict) and part.get("type", "text") == "text"
    return is_text and isinstance(part.get("text"), str)


def _read_options(cell: Any, column: str) -> dict[str, Any]:
    refuse_bad_cell(cell, column)
    if isinstance(cell, bytes):
        cell = decode(cell, column)
    if isinstance(cell, str):
        if not cell.strip():
            return {}
        cell = parse_json(cell, column)
        if not isinstance(cell, Mapping):
            raise RowError("TypeError", column, f"is {shown(cell)}; it takes an object")
        return dict(cell)
    if not isinstance(cell, Mapping):
        kind = type(cell).__name__
        reason = f"is {shown(cell)} ({kind}); it takes a struct or JSON text"
        raise RowError("TypeError", column, reason)
    # Arrow fills the keys of other rows' schemas with null, at every depth.
    return {key: _as_integer(key, value) for key, value in without_nulls(dict(cell)).items()}


def _as_integer(key: str, value: Any) -> Any:
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if key in INTEGER_RANGES and is_whole else value


def _needs_default(key: str, shown: str) -> RowError:
    reason = f"asks for {shown}, but the output has no column for it"
    return RowError(
        "ConfigError", SAMPLING_COLUMN, f"{reason}; set {key} in the operator's sampling_params too"
    )
