"""`raymoe models`: what runs, and what a given model is and needs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from raymoe.cli.model_tables import families_table, formats_table, model_table
from raymoe.cli.options import model_by_name
from raymoe.errors import ConfigError
from raymoe.memory.source import fetch_config, is_hub_name
from raymoe.memory.weights import WeightStore
from raymoe.specs.files import read_json_object
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS

CONFIG_FILE = "config.json"

Source = Annotated[
    str | None,
    typer.Argument(
        help=f"A directory, a config.json, a name on the Hugging Face hub, or one of "
        f"{', '.join(MODEL_PRESETS)}.",
        metavar="[MODEL]",
    ),
]


def run(model: Source = None) -> None:
    """List the families and weight formats that run, or say what a model is, and whether it runs.

    Of a directory with weights every tensor's name, shape and type is checked, and nothing is
    loaded. Of a hub name nothing but config.json is downloaded. A model that does not run is
    refused with the reason, and exit code 2.
    """
    console = Console()
    if model is None:
        console.print(families_table())
        console.print(formats_table())
        return
    spec = _find(model)
    console.print(model_table(spec))
    if Path(model).is_dir():
        checked = _check_weights(spec, Path(model))
    else:
        checked = "its weights were not looked at"
    console.print(f"It runs; {checked}.", style="bold")


def _find(text: str) -> ModelSpec:
    path = Path(text)
    if text.lower() in MODEL_PRESETS or path.is_dir():
        return model_by_name(text)
    if path.is_file():
        if path.name != CONFIG_FILE:
            raise ConfigError(f"{text}: expected a directory, or a file called {CONFIG_FILE}")
        return ModelSpec.from_directory(path.absolute().parent)
    if path.name != text and is_hub_name(text):
        config = fetch_config(text)
        return ModelSpec.from_config(read_json_object(config.parent, config.name), name=text)
    return model_by_name(text)


def _check_weights(spec: ModelSpec, directory: Path) -> str:
    """Open the checkpoint, where there is one; returns what was found.

    Raises:
        CheckpointError: Names the tensor that is missing, too many or different.
    """
    if not any(directory.glob("*.safetensors")):
        return f"{directory} has no weights (*.safetensors)"
    store = WeightStore.open(spec, directory)
    return f"all {len(store.checkpoint.names()):,} tensors of {directory} are as they should be"
