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

import difflib
from collections.abc import Iterable


class RaymoeError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(RaymoeError, ValueError):
    """User input that cannot be used; names the field, the value and the limit."""


class UnknownOptionError(ConfigError):
    """An option that does not exist; suggests the nearest one.

    Args:
        known: The accepted names.
        where: What takes the option, such as "sampling_params".
    """

    def __init__(self, name: str, known: Iterable[str], where: str = "option") -> None:
        choices = sorted(known)
        near = difflib.get_close_matches(name, choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(choices)}"
        super().__init__(f"unknown {where} {name!r}{hint}")


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


class RaymoeWarning(UserWarning):
    """Base of every warning raised on purpose."""


class PerformanceWarning(RaymoeWarning):
    """Something works but is slower than it should be; the message says what to change."""
