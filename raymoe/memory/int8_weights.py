"""Matrices in int8, made of those of a checkpoint while they are loaded."""

from collections.abc import Iterable

import torch

from raymoe.codecs import StoredMatrix, Weight
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_experts import packed_experts_are_used
from raymoe.kernels.cpu_linear import quantise_matrix
from raymoe.memory.weights import Weights
from raymoe.specs.layer_weights import EMBEDDING, HEAD
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_format import Int8Channel
from raymoe.specs.weight_names import model_weights


def int8_model(spec: ModelSpec) -> ModelSpec:
    """The model with its projections, networks, experts and head in int8.

    Networks stay as they are if a layer has an activation that no packed kernel has.

    Raises:
        ConfigError: It is quantised in another format.
    """
    if spec.quantization is not None:
        if all(isinstance(each, Int8Channel) for each in spec.quantization.formats):
            return spec
        raise ConfigError(
            f"compute_dtype is 'int8', but {spec.name} is stored as {spec.quantization.name}; "
            "leave compute_dtype out, or take a checkpoint in bfloat16"
        )
    activations = {layer.ffn.activation for layer in spec.layers}
    are_packed = all(packed_experts_are_used(torch.bfloat16, each) for each in activations)
    return spec.with_int8(has_plain_networks=not are_packed)


class Int8Weights:
    """Weights of a model, those quantised that `int8_model` has in int8."""

    def __init__(self, weights: Weights, model: ModelSpec, int8: ModelSpec) -> None:
        self.dtype: torch.dtype = weights.dtype
        self._weights, self._int8, self._shapes = weights, int8, model_weights(int8)
        self._stored = {HEAD: EMBEDDING} if model.tie_word_embeddings else {}

    def __call__(self, name: str) -> Weight:
        weight = self._weights(self._stored.get(name, name))
        stored = self._int8.format_of(name, self._shapes[name])
        if not isinstance(stored, Int8Channel) or isinstance(weight, StoredMatrix):
            return weight
        return quantise_matrix(weight, is_rotated=stored.is_rotated)

    def drop_pages(self, names: Iterable[str]) -> None:
        self._weights.drop_pages([self._stored.get(name, name) for name in names])
