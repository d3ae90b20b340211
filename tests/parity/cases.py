"""Checkpoints and reference rows of all configurations, each made once per test session."""

import fcntl
import functools
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import transformers

from tests.parity.configurations import CONFIGURATIONS, Configuration
from tests.parity.oracle import Reference, make_checkpoint, make_reference

DIRECTORY = "RAYMOE_TEST_CASES"  # in the environment of all processes of a test session


@dataclass(frozen=True, kw_only=True)
class Case:
    """A random model on disk, and what transformers generates by it."""

    configuration: Configuration
    directory: Path
    reference: Reference


@functools.cache
def get_case(name: str) -> Case:
    """The case of the configuration of this name, which the first process makes for all."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    configuration = next(item for item in CONFIGURATIONS if item.name == name)
    directory = Path(os.environ[DIRECTORY], re.sub(r"\W+", "-", name))
    with directory.with_suffix(".pickle").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.tell():  # opened at its end
            file.seek(0)
            reference = pickle.load(file)
        else:
            reference = make_reference(make_checkpoint(configuration, directory), configuration)
            pickle.dump(reference, file)
    return Case(configuration=configuration, directory=directory, reference=reference)
