"""`raymoe models`: what runs, and what a given model is and needs."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from raymoe.cli import model_by_name
from raymoe.download.hub import fetch_config
from raymoe.errors import CheckpointError, ConfigError
from raymoe.memory.weights import WeightStore
from raymoe.specs.differences import differences_of
from raymoe.specs.families import FAMILIES, TESTED_WITH, WRAPPERS
from raymoe.specs.families.rules import Family
from raymoe.specs.files import CONFIG_FILE, check_adapter, is_hub_name, read_config
from raymoe.specs.hardware import HARDWARE_INSTANCES, HARDWARE_PRESETS
from raymoe.specs.layers import DenseSpec, MoeSpec, RouterSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.other_formats import other_format
from raymoe.specs.presets_models import MODEL_PRESETS, model_preset
from raymoe.specs.quantization import METHODS
from raymoe.specs.weight_format import BFLOAT16_BYTES
from raymoe.units import format_bytes

Source = Annotated[
    str | None,
    typer.Argument(
        help="Describe this model: a directory, a config.json, a name on the Hugging Face hub, a "
        "URI of a store, or a short name; without it, all short names are listed.",
        metavar="[MODEL]",
    ),
]


def run(
    model: Source = None,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was found as one JSON object.")
    ] = False,
) -> None:
    """List the model families and weight formats that run, or say whether a given model runs.

    The name, shape and type of every tensor in a directory are checked, but no weights are loaded.
    Only config.json is downloaded from the hub. A model that does not run is refused with the
    reason and the exit code 2.
    """
    console = Console()
    if as_json:
        typer.echo(json.dumps(_known() if model is None else _as_json(model), indent=2))
        return
    if model is None:
        console.print(families_table())
        console.print(formats_table())
        return
    spec = _find(model)
    console.print(model_table(spec))
    if Path(model).is_dir():
        checked = _check_weights(spec, Path(model))
    else:
        checked = "its weights were not checked"
    console.print(f"It runs; {checked}.", style="bold")


def _known() -> dict[str, list[str]]:
    names = sorted({*FAMILIES, *WRAPPERS})
    lists = {
        "families": names,
        "tested_with": [TESTED_WITH],
        "formats": list(METHODS),
        "models": list(MODEL_PRESETS),
    }
    return {**lists, "hardware": [*HARDWARE_PRESETS, *HARDWARE_INSTANCES]}


def _as_json(text: str) -> dict[str, object]:
    spec = _find(text)
    is_directory = Path(text).is_dir()
    return {
        "name": spec.name,
        "family": spec.model_type,
        "num_parameters": spec.num_parameters,
        "num_active_parameters": spec.num_active_parameters,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "max_model_len": spec.max_model_len,
        "weight_format": "none" if spec.quantization is None else spec.quantization.name,
        "weight_bytes": spec.stored_bytes,
        "kv_bytes_per_token": spec.kv_bytes_per_token(BFLOAT16_BYTES),
        "differs_from_transformers": differences_of(spec),
        "checked": _check_weights(spec, Path(text)) if is_directory else "",
    }


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
        return ModelSpec.from_config(read_config(config.parent), name=text)
    return model_by_name(text)


def _check_weights(spec: ModelSpec, directory: Path) -> str:
    """Open the checkpoint, where there is one; returns what was found.

    Raises:
        CheckpointError: Names the tensor that is missing, too many or different, the weights of
            another format, or an adapter beside the model.
    """
    check_adapter(directory)
    if not any(directory.glob("*.safetensors")):
        found = other_format({path.name for path in directory.iterdir()})
        if found is not None:
            raise CheckpointError(f"{directory}: no weights in safetensors; {found}")
        return f"{directory} has no weights (*.safetensors)"
    store = WeightStore.open(spec, directory)
    return f"all {len(store.checkpoint.names()):,} tensors of {directory} are as they should be"


Row = tuple[str, str]


def families_table() -> Table:
    """What runs: blocks and formats of each family, and what its tokens were compared with."""
    caption = f"each runs in every weight format, on CPU and GPU; compared with {TESTED_WITH}"
    table = Table(title="families", caption=caption)
    for column in ("model_type", "attention", "experts", "by name"):
        table.add_column(column)
    presets: dict[str, list[str]] = {}
    for name in MODEL_PRESETS:
        presets.setdefault(model_preset(name).model_type, []).append(name)
    for model_type, family in sorted(FAMILIES.items()):
        names = ", ".join(presets.get(model_type, []))
        table.add_row(model_type, _attention_of_family(family), _experts_of_family(family), names)
    for model_type, wrapper in sorted(WRAPPERS.items()):
        table.add_row(model_type, f"text: {', '.join(wrapper.texts)}", "", "")
    return table


def _attention_of_family(family: Family) -> str:
    notes = {
        "QK norm": family.qk_norm != "none",
        "windows": family.windowed_layers != "none",
        "sinks": family.sinks != "none",
        "gate": family.gate is not None,
        "states": family.recurrent is not None,
        "chosen positions": family.indexer is not None or family.blocks is not None,
    }
    kind = "latent" if family.is_latent else "grouped-query"
    return ", ".join([kind, *(note for note, is_there in notes.items() if is_there)])


def formats_table() -> Table:
    """Every way of storing weights that is known."""
    caption = (
        "each runs with every family, on CPU and GPU; only weights are quantised, not activations"
    )
    table = Table(title="weight formats", caption=caption)
    table.add_column("quant_method")
    table.add_column("weights")
    table.add_row("none", "bfloat16, float16, float32")
    for name, method in METHODS.items():
        table.add_row(name, method.about)
    return table


def model_table(spec: ModelSpec) -> Table:
    table = Table(title=spec.name, show_header=False)
    for row in rows_of(spec):
        table.add_row(*row)
    return table


def _experts_of_family(family: Family) -> str:
    if family.moe is None:
        return "none"
    shared = "" if family.moe.shared is None else ", shared"
    return f"{family.moe.router.scoring}{shared}"


def rows_of(spec: ModelSpec) -> Iterator[Row]:
    yield "family", f"{spec.model_type} ({FAMILIES[spec.model_type].architecture})"
    yield (
        "parameters",
        f"{_billions(spec.num_parameters)}, {_billions(spec.num_active_parameters)} active",
    )
    yield (
        "size",
        f"{spec.num_layers} layers, hidden {spec.hidden_size:,}, vocabulary {spec.vocab_size:,}",
    )
    yield "context", f"{spec.max_model_len:,} tokens"
    for attention, count in Counter(layer.attention for layer in spec.layers).items():
        yield "attention", f"{count} layers: {attention.describe()}"
    for ffn, count in Counter(layer.ffn for layer in spec.layers).items():
        yield "network", f"{count} layers: {_ffn(ffn)}"
    formats = "as trained" if spec.quantization is None else spec.quantization.name
    yield "weights", f"{format_bytes(spec.stored_bytes)}, {formats} ({spec.dtype or 'bfloat16'})"
    yield (
        "KV cache of a token",
        f"{format_bytes(spec.kv_bytes_per_token(BFLOAT16_BYTES))} in bfloat16",
    )
    if spec.has_states:
        yield "states of a sequence", format_bytes(spec.state_bytes(BFLOAT16_BYTES))
    for difference in differences_of(spec):
        yield "differs from transformers", difference


def _ffn(ffn: DenseSpec | MoeSpec) -> str:
    if isinstance(ffn, DenseSpec):
        return f"dense, hidden {ffn.hidden:,}" if ffn.hidden else "none"
    latent = "" if ffn.latent_size is None else f" in a latent of {ffn.latent_size:,}"
    shared = "" if ffn.shared is None else f", shared {ffn.shared.hidden:,}"
    return (
        f"{ffn.top_k} of {ffn.num_experts} experts, hidden {ffn.expert_hidden:,}{latent}{shared}, "
        f"{_router(ffn.router)}"
    )


def _router(router: RouterSpec) -> str:
    if router.num_groups == 1:
        return f"{router.scoring} router"
    return f"{router.scoring} router, {router.top_groups} of {router.num_groups} groups"


def _billions(count: int) -> str:
    return f"{count / 1e9:,.1f} B" if count >= 1e8 else f"{count / 1e6:,.1f} M"
