"""Checkpoints of any size whose weights are random bits, written without a model in memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from raymoe.memory.weights import DummyWeights
from raymoe.specs.files import INDEX_FILE
from raymoe.specs.layer_weights import layer_prefix
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import model_weights


def make_random_checkpoint(config: dict[str, Any], directory: Path) -> int:
    """Write config.json and a file for each layer; returns the bytes of all tensors.

    Weights have the canonical names; those that are not quantised are bfloat16.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_config(config)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    prefixes = [layer_prefix(i) for i in range(spec.num_layers)]
    for number, prefix in enumerate(["", *prefixes]):
        tensors = dict(_tensors(spec, prefix))
        file = f"model-{number}.safetensors"
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return num_bytes


def _tensors(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, Tensor]]:
    weights = DummyWeights(spec, torch.bfloat16)
    for name in model_weights(spec):
        if not (name.startswith(prefix) if prefix else ".layers." not in name):
            continue
        weight = weights(name)
        if isinstance(weight, Tensor):
            yield name, weight
            continue
        module = name.removesuffix(".weight")
        for piece in weight.format.pieces(*weight.shape):
            yield module + piece.suffix, weight.pieces[piece.name]
