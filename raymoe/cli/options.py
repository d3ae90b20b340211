"""Values that several commands take."""

import os
from pathlib import Path

from raymoe.errors import ConfigError
from raymoe.specs.model import ModelSpec
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
    path = Path(text)
    if path.is_dir() and text.lower() not in MODEL_PRESETS:
        return ModelSpec.from_directory(path)
    if path.name != text:
        raise ConfigError(
            f"--model {text}: there is no such directory; by name there are "
            f"{', '.join(MODEL_PRESETS)}"
        )
    return model_preset(text)


os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # read when Ray is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
