"""The errors that raymoe raises on purpose.

RaymoeError
  ConfigError (ValueError)        user input
    UnknownOptionError            with a suggestion
    UnsupportedModelError         lists what is supported
  CheckpointError                 file, tensor name, expected and found
  InfeasiblePlanError             nothing fits; shows the footprint and the bytes missing
  ScheduleError                   an invariant of a schedule is broken
  CapacityError                   KV blocks or memory exhausted
  ExecutionError                  a task or the engine failed; carries the cause
  WorkerProcessError              a helper process was ended from outside; the row may be retried
RaymoeWarning
  PerformanceWarning              slower than predicted, or a slow path was taken
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Self

from raymoe.suggestions import find_absence, find_meant

EXIT_BAD_USAGE = 2  # of the command after a ConfigError


class RaymoeError(Exception):
    """Base of every error raised on purpose.

    Examples:
        >>> try:
        ...     raymoe.SamplingParams(temperatur=0.5)
        ... except raymoe.RaymoeError as error:
        ...     print(f"{type(error).__name__}: {error}")
        UnknownOptionError: unknown sampling parameter 'temperatur'; did you mean 'temperature'?

    Attributes:
        row: Position in its batch of the row that is at fault; None if none is.
        column: The column at fault.
        path: The file or directory at fault.
    """

    row: int | None = None
    column: str | None = None
    path: str | None = None

    def at(self, *, row: int | None = None, column: str | None = None, path: object = None) -> Self:
        """Note what is at fault, and return the error."""
        self.row, self.column = row, column
        self.path = None if path is None else str(path)
        return self


class ConfigError(RaymoeError, ValueError):
    """User input that cannot be used; names the field, the value and the limit."""


class UnknownOptionError(ConfigError):
    """An option that does not exist; says what it is called here, or why it is absent.

    Attributes:
        name: What was given.
        known: The accepted names.
        where: What takes the option, such as "sampling parameter".
        suggestion: The name that was probably meant, or None.
    """

    def __init__(self, name: str, known: Iterable[str], where: str = "option") -> None:
        self.name, self.known, self.where = name, tuple(sorted(known)), where
        self.suggestion = find_meant(name, self.known)
        if self.suggestion:
            hint = f"did you mean {self.suggestion!r}?"
        else:
            hint = find_absence(name) or f"known: {', '.join(self.known)}"
        super().__init__(f"unknown {where} {name!r}; {hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.known, self.where), self.__dict__


class UnsupportedModelError(ConfigError):
    """A model, or a field of its configuration, whose computation raymoe does not implement."""


class CheckpointError(RaymoeError):
    """Weights that are missing, damaged, unsafe or do not fit the configuration."""


class InfeasiblePlanError(RaymoeError):
    """No policy fits the memory; the message has the footprint and the missing bytes."""


class ScheduleError(RaymoeError):
    """A schedule that breaks an invariant; the message shows the task and its lane."""


class CapacityError(RaymoeError):
    """KV blocks or memory ran out."""


class ExecutionError(RaymoeError):
    """A task or the engine failed; `__cause__` is the first error."""


class WorkerProcessError(RaymoeError):
    """A helper process (tokenizer, chat template, grammar) was ended from outside.

    The row is not at fault: a journal does not keep it, and a resumed job tries it again.
    """


# Errors of rows that may succeed in another run begin so.
TEMPORARY_ERRORS = (f"{WorkerProcessError.__name__}:", f"{CapacityError.__name__}:")


class RaymoeWarning(UserWarning):
    """Base of every warning raised on purpose.

    Examples:
        >>> warnings.simplefilter("error", raymoe.RaymoeWarning)  # each ends the job
    """


class PerformanceWarning(RaymoeWarning):
    """Something works but is slower than it should be; the message says what to change."""


MAX_DESCRIPTION_CHARACTERS = 4000
_STEP = "while "


@contextlib.contextmanager
def in_step(step: str) -> Iterator[None]:
    """Note on an error from inside what was being done, such as "finding tool calls"."""
    try:
        yield
    except Exception as error:
        error.add_note(_STEP + step)
        raise


def describe(error: BaseException) -> str:
    """Return "Type: while doing this: message", cut, and such that UTF-8 can hold it."""
    try:
        message = str(error)
        notes = [*getattr(error, "__notes__", ())]
    except Exception:  # whoever wrote the exception forgot something
        message, notes = "it has no message", []
    steps = [note for note in notes if isinstance(note, str) and note.startswith(_STEP)]
    return encodable(": ".join([type(error).__name__, *steps[:1], message]))


def encodable(text: str) -> str:
    """Cut a text for an error column, with lone surrogates as their escapes."""
    if len(text) > MAX_DESCRIPTION_CHARACTERS:
        text = text[: MAX_DESCRIPTION_CHARACTERS - 3] + "..."
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()
