"""Where results differ from those of transformers on purpose: one entry for each case.

A test for each computes both and fails when transformers no longer differs; then the entry goes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from raymoe.specs.model import ModelSpec, MoeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One case.

    Attributes:
        models: Which models it concerns, in words.
        what: What transformers computes, and what is computed here.
        reason: Why.
        source: Where to read more.
        concerns: Whether it concerns a model.
    """

    models: str
    what: str
    reason: str
    source: str
    concerns: Callable[[ModelSpec], bool]


def _has_limits(spec: ModelSpec) -> bool:
    networks = [layer.ffn for layer in spec.layers]
    shared = [ffn.shared for ffn in networks if isinstance(ffn, MoeSpec) and ffn.shared is not None]
    return any(network.clamp is not None for network in (*networks, *shared))


DIFFERENCES = (
    Difference(
        models="nemotron_h",
        what="transformers 5.24 bounds the time steps of prompts below by time_step_min, and not "
        "those of generated tokens; here none has a bound",
        reason="the models were trained without one: NVIDIA's code and vLLM have none",
        source="transformers pull request 48989",
        concerns=lambda spec: spec.model_type == "nemotron_h",
    ),
    Difference(
        models="bailing_hybrid with limits of gated products",
        what="transformers 5.24 does not read expert_swiglu_limit_list and "
        "share_expert_swiglu_limit_list; here they bound the silu of the gate and the other factor",
        reason="the models were trained with them, and answer worse without: vLLM has them",
        source="_get_layer_swiglu_limit in bailing_moe_v3.py of vLLM",
        concerns=lambda spec: spec.model_type == "bailing_hybrid" and _has_limits(spec),
    ),
    Difference(
        models="rope of type dynamic, or longrope with two sets of factors",
        what="in a padded batch transformers rotates all rows for the longest one; here each row "
        "is rotated for its own length, as transformers does for a row alone",
        reason="a row's tokens do not depend on other rows of its batch",
        source="dynamic_rope_update in modeling_rope_utils.py of transformers",
        concerns=lambda spec: any(
            rope.kind == "dynamic" or rope.short_factor != rope.long_factor for rope in spec.ropes
        ),
    ),
    Difference(
        models="hy_v4",
        what="transformers 5.24 rotates the halves of rotated dimensions with each other, and "
        "norms latents with an epsilon of 1e-6; here neighbouring dimensions are rotated with each "
        "other, and latents have rms_norm_eps, as transformers has it for hy_v4_vl",
        reason="the weights are stored for that: vLLM, SGLang and mlx-lm compute it",
        source="HYV4MLAAttention in models/hy_v4/nvidia/attention.py of vLLM",
        concerns=lambda spec: spec.model_type == "hy_v4",
    ),
)


def differences_of(spec: ModelSpec) -> list[str]:
    """What differs from transformers in this model, in sentences."""
    found = (one for one in DIFFERENCES if one.concerns(spec))
    return [f"{one.what} ({one.reason}; {one.source})" for one in found]
