"""Lower bounds of a job's time: operations over peak rate, bytes over bandwidth.

All rows are processed together: prefill reads every weight once, each decode step reads the weights
it activates (the expected number of distinct experts) and the KV cache. A phase takes the longer of
its two times; nothing else costs time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from raymoe.plan.work import LayerWork, ModelWork
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload

# Share of the bare dot-product instruction rate that the best matrix products reach.
GEMM_EFFICIENCY = 0.94


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBound:
    prefill_s: float
    decode_s: float
    prefill_limit: str
    decode_limit: str

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def job_bound(
    model: ModelSpec,
    prompt_lengths: Sequence[int],
    generated_tokens: int,
    *,
    flop_per_s: float,
    bytes_per_s: float,
    bytes_per_element: int = 2,
) -> JobBound:
    """Bound of a job whose rows all generate the same number of tokens, the first by prefill.

    `flop_per_s` and `bytes_per_s` are attainable rates; `bytes_per_element` applies to the KV cache
    and to unquantised weights.
    """
    work = ModelWork.of(model, bytes_per_element)
    rows = len(prompt_lengths)
    prompt_tokens = sum(prompt_lengths)
    pairs = sum(length * (length + 1) // 2 for length in prompt_lengths)
    prefill_flop = work.token_flop * prompt_tokens + work.head_flop * rows
    prefill_flop += work.prefill_pair_flop * pairs
    prefill_bytes = work.all_weight_bytes + work.kv_token_bytes * prompt_tokens
    steps = generated_tokens - 1
    contexts = steps * prompt_tokens + rows * steps * generated_tokens // 2
    decode_flop = (work.token_flop + work.head_flop) * rows * steps + work.pair_flop * contexts
    decode_bytes = work.activated_weight_bytes(rows) * steps + work.kv_token_bytes * contexts
    decode_bytes += 2 * work.updated_bytes * rows * steps
    for layer in work.layers:
        if (recent := layer.attention.recent) is not None:
            seen = sum(_contexts(1, length, recent.window) for length in prompt_lengths)
            prefill_flop += recent.pair_flop * seen
            seen = sum(_contexts(length + 1, steps, recent.window) for length in prompt_lengths)
            decode_flop += recent.pair_flop * seen
            decode_bytes += recent.row_bytes * seen
    prefill = _phase(prefill_flop / flop_per_s, prefill_bytes / bytes_per_s)
    decode = _phase(decode_flop / flop_per_s, decode_bytes / bytes_per_s)
    return JobBound(
        prefill_s=prefill[0], decode_s=decode[0], prefill_limit=prefill[1], decode_limit=decode[1]
    )


def _phase(compute_s: float, memory_s: float) -> tuple[float, str]:
    return (compute_s, "compute") if compute_s >= memory_s else (memory_s, "memory bandwidth")


class Limit(StrEnum):
    LINK = "link"
    HOST_MEMORY = "host memory"
    GPU = "operations"
    GPU_MEMORY = "GPU memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBound:
    """Least seconds that each part of the node needs; the longest binds."""

    num_steps: float
    link_s: float  # weights over the link from host to device
    host_memory_s: float  # reads of weights and KV from host memory
    gpu_s: float  # operations on GPU and CPU cores together
    # Reads of weights from device memory, or of states by the GPU and cores together.
    gpu_memory_s: float

    @property
    def seconds(self) -> float:
        return max(self._seconds.values())

    @property
    def limit(self) -> Limit:
        return max(self._seconds, key=self._seconds.__getitem__)

    @property
    def _seconds(self) -> dict[Limit, float]:
        return {
            Limit.LINK: self.link_s,
            Limit.HOST_MEMORY: self.host_memory_s,
            Limit.GPU: self.gpu_s,
            Limit.GPU_MEMORY: self.gpu_memory_s,
        }


def device_bound(
    work: ModelWork,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    has_host_experts: bool = False,
) -> DeviceBound:
    """The bound of a job on a node with a GPU.

    Args:
        has_host_experts: Whether cores may compute experts: these need not be on the device then.
    """
    rows = [workload.lengths(row) for row in range(workload.num_rows)]
    tokens = sum(prompt + generated - 1 for prompt, generated in rows)
    memory = hardware.host_memory_bytes + hardware.gpu_memory_bytes - work.all_weight_bytes
    memory -= work.table_bytes
    longest_row = max(_pairs(work, [row], _kv_bytes, 0) / row[1] for row in rows)
    longest_row += work.state_bytes
    held_bytes = _pairs(work, rows, _kv_bytes, 0)
    held_bytes += work.state_bytes * sum(generated for _, generated in rows)
    through_memory = held_bytes / max(memory, longest_row)
    num_steps = max(through_memory, *(generated for _, generated in rows))
    read = num_steps * work.activated_weight_bytes(tokens / num_steps)
    on_device = num_steps * work.activated_weight_bytes(0) if has_host_experts else read
    held = num_steps * hardware.gpu_memory_bytes
    recent_flop, recent_bytes = _recent(work, rows)
    kv_read = _pairs(work, rows, _kv_bytes, 1) + recent_bytes
    updated = 2 * work.updated_bytes * sum(generated - 1 for _, generated in rows)
    both_bytes_per_s = hardware.gpu_bytes_per_s + hardware.host_bytes_per_s
    flop: float = work.token_flop * tokens + work.head_flop * sum(
        generated for _, generated in rows
    )
    for num_chosen, amount in _prefill_flop(work).items():
        flop += amount * sum(_contexts(1, prompt, num_chosen) for prompt, _ in rows)
    flop += _pairs(work, rows, _pair_flop, 1) + recent_flop
    return DeviceBound(
        num_steps=num_steps,
        link_s=max(0.0, on_device - held) / hardware.htod_bytes_per_s,
        host_memory_s=max(0.0, read + kv_read - held) / hardware.host_bytes_per_s,
        gpu_s=flop / (hardware.gpu_flop_per_s + hardware.host_flop_per_s),
        gpu_memory_s=max(
            on_device / hardware.gpu_bytes_per_s, (on_device + updated) / both_bytes_per_s
        ),
    )


def _pairs(
    work: ModelWork,
    rows: Iterable[tuple[int, int]],
    of_a_token: Callable[[LayerWork], int],
    first_step: int,
) -> float:
    """Sum a per-context-token amount over all layers, contexts and steps from `first_step` on.

    The context of step j of a row, counted from 0, is its prompt plus j tokens.
    """
    windows: dict[int | None, int] = {}
    for layer in work.layers:
        seen = layer.attention.window or layer.attention.num_chosen
        windows[seen] = windows.get(seen, 0) + of_a_token(layer)
    return float(
        sum(
            amount * _contexts(prompt + first_step, generated - first_step, window)
            for prompt, generated in rows
            for window, amount in windows.items()
        )
    )


def _recent(work: ModelWork, rows: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Operations of all tokens on rows in states, and bytes that steps read of them."""
    amounts = Counter(
        layer.attention.recent for layer in work.layers if layer.attention.recent is not None
    )
    flop = num_bytes = 0.0
    for recent, count in amounts.items():
        of_prompts = sum(_contexts(1, prompt, recent.window) for prompt, _ in rows)
        of_steps = sum(
            _contexts(prompt + 1, generated - 1, recent.window) for prompt, generated in rows
        )
        flop += count * recent.pair_flop * (of_prompts + of_steps)
        num_bytes += count * recent.row_bytes * of_steps
    return flop, num_bytes


def _prefill_flop(work: ModelWork) -> dict[int | None, int]:
    """Operations per pair of a prompt, by the number of tokens that each attends to at most."""
    amounts: dict[int | None, int] = {}
    for layer in work.layers:
        num_chosen = layer.attention.num_chosen
        amounts[num_chosen] = amounts.get(num_chosen, 0) + layer.attention.prompt_pair_flop
    return amounts


def _kv_bytes(layer: LayerWork) -> int:
    return layer.attention.kv_token_bytes


def _pair_flop(layer: LayerWork) -> int:
    return layer.attention.pair_flop


def _contexts(first: int, count: int, window: int | None) -> int:
    growing = count if window is None else min(count, max(0, window - first))
    full = 0 if window is None else (count - growing) * window
    return growing * first + growing * (growing - 1) // 2 + full
