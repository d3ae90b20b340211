"""Top-p in linear time: weighted selection finds the border of the nucleus without a sort.

A sort of each row costs as much as a layer when the vocabulary is large and the distribution flat.
"""

import numpy as np
import numpy.typing as npt

from raymoe.engine.jit import compiled

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]


@compiled
def keep_nucleus(logits_RV: Float32s, top_p_R: Float32s, log_sum_R: Float32s) -> None:
    """Make everything outside of the nucleus of its row -inf.

    Args:
        logits_RV: Changed in place.
        top_p_R: Probability that the nucleus reaches.
        log_sum_R: Logarithm of the sum of exponentials; rows where it is not finite are left alone.
    """
    values = np.empty(logits_RV.shape[1], np.float32)
    weights = np.empty(logits_RV.shape[1], np.float64)
    for row in range(logits_RV.shape[0]):
        log_sum, top_p = log_sum_R[row], np.float64(top_p_R[row])
        if np.isfinite(log_sum):
            count = _candidates(logits_RV[row], log_sum, top_p, (values, weights))
            threshold, above = _border(values[:count], weights[:count], top_p)
            _drop_below(logits_RV[row], threshold, log_sum, top_p - above)


@compiled
def _candidates(
    logits_V: Float32s, log_sum: float, top_p: float, out: tuple[Float32s, Float64s]
) -> int:
    """Tokens that may be in the nucleus; those below a share of (1 - top_p) / V are not."""
    # The slack lets no rounding empty the set where all tokens are equal.
    floor = log_sum + np.log(max((1.0 - top_p) / len(logits_V), 1e-30)) - 1e-3
    count = 0
    for logit in logits_V:
        if logit >= floor:
            out[0][count] = logit
            out[1][count] = np.exp(np.float64(logit) - log_sum)
            count += 1
    return count


@compiled
def _border(values: Float32s, weights: Float64s, top_p: float) -> tuple[float, float]:
    """The least value in the nucleus, and the weight of all greater ones."""
    begin, end, above = 0, len(values), 0.0
    while True:
        pivot = values[(begin + end) // 2]
        equal, less = _partition(values, weights, (begin, end), pivot)
        greater_weight = weights[begin:equal].sum()
        if above + greater_weight >= top_p and equal > begin:
            end = equal
            continue
        equal_weight = weights[equal:less].sum()
        if above + greater_weight + equal_weight >= top_p or less == end:
            return pivot, above + greater_weight
        above += greater_weight + equal_weight
        begin = less


@compiled
def _partition(
    values: Float32s, weights: Float64s, window: tuple[int, int], pivot: float
) -> tuple[int, int]:
    """Order a window as greater, equal, less; returns where equal and less begin."""
    equal, less = window
    place = equal
    while place < less:
        value, weight = values[place], weights[place]
        if value > pivot:
            values[place], weights[place] = values[equal], weights[equal]
            values[equal], weights[equal] = value, weight
            equal += 1
            place += 1
        elif value < pivot:
            less -= 1
            values[place], weights[place] = values[less], weights[less]
            values[less], weights[less] = value, weight
        else:
            place += 1
    return equal, less


@compiled
def _drop_below(logits_V: Float32s, threshold: float, log_sum: float, missing: float) -> None:
    """Drop what is below the threshold; of what equals it, keep the first that are needed."""
    for token in range(len(logits_V)):
        if logits_V[token] == threshold and missing > 0.0:
            missing -= np.exp(np.float64(threshold) - log_sum)
        elif logits_V[token] <= threshold:
            logits_V[token] = -np.inf
