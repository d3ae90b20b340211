"""Checkpoints of any size whose weights are random bits, written without a model in memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from raymoe.codecs.stored import TORCH_DTYPES
from raymoe.memory.checkpoint import INDEX_FILE
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import Piece
from raymoe.specs.weight_names import layer_prefix, model_weights


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
    generator = torch.Generator().manual_seed(len(prefix))
    for name, shape in model_weights(spec).items():
        if not (name.startswith(prefix) if prefix else ".layers." not in name):
            continue
        stored = spec.format_of(name, shape)
        if stored is None:
            yield name, torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
            continue
        for piece in stored.pieces(*shape):
            module = name.removesuffix(".weight")
            yield module + piece.suffix, _random(piece, shape, generator)


def _random(piece: Piece, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    dtype = TORCH_DTYPES[piece.dtypes[0]]
    if piece.name == "scales":
        return torch.full(piece.shape, 0.01 if dtype.is_floating_point else 120, dtype=dtype)
    if piece.name == "shape":
        return torch.tensor(shape)
    if piece.name == "order":
        return torch.zeros(piece.shape, dtype=dtype)
    size = (*piece.shape[:-1], piece.shape[-1] * dtype.itemsize)
    return torch.randint(0, 127, size, dtype=torch.uint8, generator=generator).view(dtype)
