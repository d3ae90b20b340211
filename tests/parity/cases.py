"""Checkpoints and reference rows of all configurations, each made once per test session."""

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import transformers

from tests.parity.configurations import CONFIGURATIONS, Configuration
from tests.parity.oracle import Reference, make_checkpoint, make_reference


@dataclass(frozen=True, kw_only=True)
class Case:
    """A random model on disk, and what transformers generates by it."""

    configuration: Configuration
    directory: Path
    reference: Reference


@functools.cache
def get_case(name: str) -> Case:
    """The case of the configuration of this name; the directory lives as long as the process."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    configuration = next(item for item in CONFIGURATIONS if item.name == name)
    directory = Path(tempfile.mkdtemp(prefix="raymoe-parity-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    model = make_checkpoint(configuration, directory)
    reference = make_reference(model, configuration)
    return Case(configuration=configuration, directory=directory, reference=reference)
