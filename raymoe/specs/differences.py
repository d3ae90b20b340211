"""Where results differ from those of transformers on purpose: one entry for each case.

A test for each computes both and fails when transformers no longer differs; then the entry goes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from raymoe.specs.model import ModelSpec


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
        models="rope of type dynamic, or longrope with two sets of factors",
        what="in a padded batch transformers rotates all rows for the longest one; here each row "
        "is rotated for its own length, as transformers does for a row alone",
        reason="a row's tokens do not depend on other rows of its batch",
        source="dynamic_rope_update in modeling_rope_utils.py of transformers",
        concerns=lambda spec: any(
            rope.kind == "dynamic" or rope.short_factor != rope.long_factor for rope in spec.ropes
        ),
    ),
)


def differences_of(spec: ModelSpec) -> list[str]:
    """What differs from transformers in this model, in sentences."""
    found = (one for one in DIFFERENCES if one.concerns(spec))
    return [f"{one.what} ({one.reason}; {one.source})" for one in found]
