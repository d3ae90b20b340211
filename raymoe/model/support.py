"""What the decoder computes, of all that a `ModelSpec` can say."""

from collections.abc import Callable, Iterator, Mapping

from raymoe.errors import UnsupportedModelError
from raymoe.specs.layers import AttentionSpec, LatentAttentionSpec, MoeSpec
from raymoe.specs.model import ModelSpec


def check_supported(spec: ModelSpec) -> None:
    """Refuse a model that is understood but cannot be computed yet.

    Raises:
        UnsupportedModelError: Names everything that is missing.
    """
    missing = [feature for feature, is_used in _MISSING.items() if is_used(spec)]
    if missing:
        raise UnsupportedModelError(
            f"{spec.name} ({spec.model_type}) needs {', '.join(missing)}, which the decoder does "
            "not compute yet; `raymoe plan` can plan for it"
        )


def _grouped(spec: ModelSpec) -> Iterator[AttentionSpec]:
    for layer in spec.layers:
        if isinstance(layer.attention, AttentionSpec):
            yield layer.attention


def _moes(spec: ModelSpec) -> Iterator[MoeSpec]:
    for layer in spec.layers:
        if isinstance(layer.ffn, MoeSpec):
            yield layer.ffn


# A line goes when the decoder has learnt it.
_MISSING: Mapping[str, Callable[[ModelSpec], bool]] = {
    "latent attention": lambda spec: any(
        isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers
    ),
    "attention sinks": lambda spec: any(attention.has_sinks for attention in _grouped(spec)),
    "layer norms": lambda spec: spec.norm != "rms",
    "multipliers of embeddings, residuals or logits": lambda spec: (
        {spec.embedding_multiplier, spec.residual_multiplier, spec.logits_divisor} != {1.0}
    ),
    "a bias of the logits": lambda spec: spec.has_head_bias,
    "quantised weights": lambda spec: spec.quantization is not None,
}
