"""Whether the rates of a measured node can be true, or something else ran meanwhile."""

from collections.abc import Iterator

from raymoe.specs.hardware import Curve, DeviceCurves, HardwareSpec, HostCurves
from raymoe.units import GB, format_seconds

# More rows, longer contexts and more threads never halve a rate on an idle machine.
LOWEST_SHARE = 0.5
# A task of a step with few tokens takes some 50 us beyond its kernels. One whose threads wait for
# other programs takes their time slices, which are milliseconds.
FEW_TOKENS, MAX_OVERHEAD_S = 64, 2e-3

_HOST_CURVES = {
    "product_flop_per_s": ("projections", "rows"),
    "expert_flop_per_s": ("experts", "rows each"),
    "attention_bytes_per_s": ("decode attention", "tokens of context"),
    "attention_bytes_per_s_of_threads": ("decode attention", "threads"),
    "prefill_flop_per_s": ("prefill attention", "tokens of a prompt"),
}
_DEVICE_CURVES = {
    "product_flop_per_s": ("projections on the GPU", "rows"),
    "expert_flop_per_s": ("experts on the GPU", "rows"),
}


def find_problems(node: HardwareSpec) -> list[str]:
    """What cannot be true of an idle machine, a sentence for each; [] for one that is plausible."""
    problems = [*_overhead(node.task_overhead_s)]
    if node.host_curves is not None:
        problems += _falls(node.host_curves, _HOST_CURVES)
        problems += _overhead(node.host_curves.task_overhead_s)
    if node.device_curves is not None:
        problems += _falls(node.device_curves, _DEVICE_CURVES)
    return problems


def _falls(curves: HostCurves | DeviceCurves, names: dict[str, tuple[str, str]]) -> Iterator[str]:
    for name, (what, unit) in names.items():
        curve: Curve = getattr(curves, name)
        best_size, best = curve.points[0]
        for size, rate in curve.points:
            if rate < LOWEST_SHARE * best:
                yield (
                    f"the rate of {what} falls from {best / GB:.4g} G/s with {best_size:.4g} "
                    f"{unit} to {rate / GB:.4g} G/s with {size:.4g}"
                )
                break
            best_size, best = max((best_size, best), (size, rate), key=lambda point: point[1])


def _overhead(curve: Curve | None) -> Iterator[str]:
    few = [point for point in curve.points if point[0] <= FEW_TOKENS] if curve else []
    for tokens, seconds in few:
        if seconds > MAX_OVERHEAD_S:
            yield (
                f"in a step of {tokens:g} tokens each task takes {format_seconds(seconds)} more "
                "than its kernels"
            )
            return
