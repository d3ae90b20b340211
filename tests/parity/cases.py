"""Checkpoints and reference rows of configurations, each made once per test session."""

import fcntl
import functools
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from tests.parity.configurations import CONFIGURATIONS, Configuration
from tests.parity.oracle import (
    FEW_ROWS,
    ROWS,
    Reference,
    Rows,
    make_checkpoint,
    make_model,
    make_reference,
)

DIRECTORY = "RAYMOE_TEST_CASES"  # in the environment of all processes of a test session


@dataclass(frozen=True)
class Case:
    """A random model on disk, and what transformers generates by it."""

    configuration: Configuration
    directory: Path

    @functools.cached_property
    def reference(self) -> Reference:
        """Rows of every length that matters to some layer."""
        return self._reference("rows", ROWS)

    @functools.cached_property
    def few_rows(self) -> Reference:
        """What a mistake in the weights or formulas of a family shows in."""
        return self._reference("few_rows", FEW_ROWS)

    def _reference(self, name: str, rows: Rows) -> Reference:
        def make() -> Reference:
            return make_reference(make_model(self.configuration), self.configuration, rows)

        return _once(self.directory.with_suffix(f".{name}"), make)


@functools.cache
def get_case(name: str) -> Case:
    """The case of the configuration of this name, which the first process makes for all."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    configuration = next(item for item in CONFIGURATIONS if item.name == name)
    directory = Path(os.environ[DIRECTORY], re.sub(r"\W+", "-", name))
    _once(directory.with_suffix(".model"), lambda: bool(make_checkpoint(configuration, directory)))
    return Case(configuration, directory)


def _once(path: Path, make: Callable[[], Any]) -> Any:
    """What `make` returned in the first process that came here."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.tell():  # opened at its end
            file.seek(0)
            return pickle.load(file)
        made = make()
        pickle.dump(made, file)
        return made
