"""Values that several commands take."""

from pathlib import Path

from raymoe.errors import ConfigError
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_hardware import hardware_preset
from raymoe.specs.presets_models import MODEL_PRESETS, model_preset
from raymoe.units import parse_bytes


def size(text: object) -> int:
    """Parser of an option such as --host-memory 192GiB; typer sends the default through it, too."""
    return parse_bytes(str(text))


def model_by_name(text: str) -> ModelSpec:
    """The model that --model names: a preset, or else a directory with a `config.json`.

    Raises:
        UnknownOptionError: Neither; names the nearest preset.
        ConfigError: A path where there is no directory, or a model that is not supported.
        CheckpointError: The directory's `config.json` cannot be read.
    """
    if text.lower() not in MODEL_PRESETS and (_is_path(text) or Path(text).is_dir()):
        if not Path(text).is_dir():
            raise ConfigError(f"--model {text}: there is no such directory")
        return ModelSpec.from_directory(text)
    return model_preset(text)


def hardware_by_name(text: str) -> HardwareSpec:
    """The node that --hardware names: a preset.

    Raises:
        UnknownOptionError: There is none; names the nearest.
    """
    return hardware_preset(text)


def _is_path(text: str) -> bool:
    return len(Path(text).parts) > 1 or text.startswith(("/", "."))
