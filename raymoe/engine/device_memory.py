"""Device memory that plans leave free after a step ran out of it, and what is free now."""

import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from raymoe._version import __version__
from raymoe.errors import ConfigError
from raymoe.measure.kept import keep, kept_name
from raymoe.specs.files import read_own_json
from raymoe.units import GIB, KIB, MIB, format_bytes

_OUT_OF_MEMORY = re.compile(
    r"CUDA(?: error:)? out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Triton Error \[CUDA\]: out of memory"
)
_ASKED = re.compile(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")  # torch's words
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
# Memory in pieces may refuse much less than what a plan has wrong.
MIN_GROWTH_BYTES = 512 * MIB

logger = logging.getLogger(__name__)


def missing_bytes(error: BaseException) -> int | None:
    """What a step that failed lacked of device memory; None if it failed for another reason.

    Looks at the text, as errors of other ranks are nothing else.
    """
    text = str(error)
    if _OUT_OF_MEMORY.search(text) is None:
        return None
    asked = _ASKED.search(text)
    asked_bytes = int(float(asked[1]) * _UNITS[asked[2]]) if asked else 0
    return max(asked_bytes, MIN_GROWTH_BYTES)


@dataclass(frozen=True)
class DeviceMemory:
    """The reserve of one model on one kind of GPU, in a file.

    An engine whose step ran out of memory ends, in a Ray actor with its process. Another takes its
    place and would make the same plan; it finds the file.
    """

    path: Path

    @classmethod
    def of(cls, directory: Path, gpu: str, model: str) -> "DeviceMemory":
        """That of a model, by its name; another version of raymoe may need another reserve."""
        name = kept_name(f"reserve {gpu} {model}", repr((__version__, gpu, model)))
        return cls(directory / name)

    def reserve_bytes(self) -> int:
        """Device memory to leave free, which is 0 until a step ran out of it.

        Raises:
            ConfigError: The file is damaged.
        """
        num_bytes = self._read()
        if num_bytes:
            logger.warning(
                "%s of device memory stay free, as a step of this model has run out of it; remove "
                "%s to plan with all",
                format_bytes(num_bytes),
                self.path,
            )
        return num_bytes

    def _read(self) -> int:
        if not os.path.exists(self.path):  # noqa: PTH110 - never raises
            return 0
        found = read_own_json(self.path)
        num_bytes = found.get("reserve_bytes") if isinstance(found, dict) else None
        if type(num_bytes) is not int or num_bytes < 0:
            raise ConfigError(f"{self.path} has no number of bytes; remove it")
        return num_bytes

    def learn(self, error: BaseException) -> None:
        """Make the reserve larger by what a step lacked, if that is why it failed."""
        missing = missing_bytes(error)
        if missing is None:
            return
        try:
            num_bytes = self._read() + missing
            text = json.dumps({"reserve_bytes": num_bytes}) + "\n"
            keep(self.path, lambda path: path.write_text(text))
        except (OSError, ConfigError) as failure:
            logger.warning(
                "the device ran out of memory in a step, which cannot be noted for the next "
                "engine (%s): give it a smaller device_memory_bytes",
                failure,
            )
            return
        logger.warning(
            "the device ran out of memory in a step: the next engine leaves %s of it free",
            format_bytes(num_bytes),
        )


def log_free_memory(when: str) -> None:
    """Say how much memory of the current GPU is free, for whoever looks at a plan that is wrong."""
    if not torch.cuda.is_available():
        return
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    kept_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    logger.info(
        "device memory %s: %s of %s are free, and torch has %s at hand",
        when,
        format_bytes(free_bytes),
        format_bytes(total_bytes),
        format_bytes(kept_bytes),
    )
