"""What the decoder computes, of all that a `ModelSpec` can say."""

from collections.abc import Callable, Mapping

from raymoe.errors import UnsupportedModelError
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


# A line goes when the decoder has learnt it.
_MISSING: Mapping[str, Callable[[ModelSpec], bool]] = {
    "quantised weights": lambda spec: spec.quantization is not None,
}
