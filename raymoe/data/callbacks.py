"""What Ray Data calls for the pipelines of a dataset: checks before they start, and watches.

They are in the context of the dataset, which Ray Data sends to every worker: there they must load,
and do nothing, without raymoe.
"""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.data import DataContext

_CALLBACKS = (
    ("raymoe.data.before_start", "PrepareGenerators"),
    ("raymoe.data.journal_use", "UseJournals"),
    ("raymoe.data.cluster", "CheckFit"),
)


def register_callbacks(context: "DataContext") -> None:
    """Have Ray Data prepare, check and watch the generators of this context; idempotent."""
    known = context.custom_execution_callback_classes
    known += [one for one in (_deferred(*names) for names in _CALLBACKS) if one not in known]


@functools.cache
def _deferred(module: str, name: str) -> type:
    """Return what makes an `ExecutionCallback` of ours where raymoe is, and one of Ray's elsewhere.

    A class in a function is pickled whole, and not as the name of something in raymoe.
    """
    from ray.data._internal.execution.execution_callback import (  # noqa: PLC0415 - slow to import
        ExecutionCallback,
    )

    class Deferred(ExecutionCallback):  # type: ignore[misc]  # Ray has no types here
        def __new__(cls) -> Any:
            import importlib.util  # noqa: PLC0415 - pickled with the class

            if importlib.util.find_spec("raymoe") is None:
                return object.__new__(cls)
            return getattr(importlib.import_module(module), name)()

    return Deferred
