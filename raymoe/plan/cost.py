"""Seconds of each task of a step on host cores: work over measured rates.

Assumptions:
- Without measured curves, a task takes the longer of operations and bytes at the node's best rates
  (the roofline of Williams et al., applied to one memory level as in MoE-Lightning (ASPLOS 2025),
  section 3). The efficiency of small products is our own measurement.
- A step reads the expected number of distinct experts (independent choices); each gets the mean
  number of rows.
- Curves were measured for one shape of matrix, expert and head (`HostCurves`) and serve for all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raymoe.plan.work import LayerWork, ModelWork, StepLoad
from raymoe.schedule.graph import Op, Task
from raymoe.specs.hardware import Curve, HardwareSpec, HostCurves

# Rows at which a matrix product reaches half of its peak beyond the memory bound: packed bfloat16
# experts reach 0.93 of their best rate at 64 rows and 0.98 at 256.
HOST_HALF_EFFICIENCY_ROWS = 5.0
# Interpreter time of a task outside its kernels, on nodes where it was not measured.
TASK_OVERHEAD_S = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    tokens: float
    attention_pairs: float  # pairs of a query token and a context token it attends to
    context_tokens: float  # context tokens whose KV is read, summed over sequences
    logit_rows: float  # tokens whose logits are computed
    prefill_tokens: float = 0.0  # prompt tokens among `tokens`
    prefill_pairs: float = 0.0  # pairs of prompt tokens among `attention_pairs`

    @property
    def decode_rows(self) -> float:
        return self.tokens - self.prefill_tokens

    @property
    def decode_pairs(self) -> float:
        return self.attention_pairs - self.prefill_pairs

    @classmethod
    def of(cls, load: StepLoad) -> "StepShape":
        decoding = load.decode_rows * load.decode_context
        chunk = min(load.prompt_chunk, load.prompt_tokens) or 1.0
        prompt_pairs = load.prompt_tokens * (load.prompt_spread * chunk + 1) / 2
        return cls(
            tokens=load.tokens,
            attention_pairs=decoding + prompt_pairs,
            context_tokens=decoding + load.prompt_tokens,
            logit_rows=load.decode_rows + load.prompt_tokens / chunk,
            prefill_tokens=load.prompt_tokens,
            prefill_pairs=prompt_pairs,
        )

    @classmethod
    def decode(cls, rows: int, context: int) -> "StepShape":
        pairs = rows * context
        return cls(tokens=rows, attention_pairs=pairs, context_tokens=pairs, logit_rows=rows)

    @classmethod
    def prefill(cls, rows: int, prompt: int) -> "StepShape":
        pairs = rows * prompt * (prompt + 1) // 2
        return cls(
            tokens=rows * prompt,
            attention_pairs=pairs,
            context_tokens=rows * prompt,
            logit_rows=rows,
            prefill_tokens=rows * prompt,
            prefill_pairs=pairs,
        )


@dataclass(frozen=True, slots=True)
class HostCost:
    """Cost model of a step whose tasks all run on all host cores.

    On a measured node, 16-bit matrix products use the measured rate at their number of rows,
    attention the measured rate at its context length, and elementwise work the measured activation
    bandwidth. On other nodes a task takes its roofline time.
    """

    work: ModelWork
    hardware: HardwareSpec
    shape: StepShape

    def duration_s(self, task: Task) -> float:
        return self._overhead_s() + self.kernel_s(task)

    def kernel_s(self, task: Task) -> float:
        return _SECONDS[task.op](self, task)

    @property
    def curves(self) -> HostCurves | None:
        """Measured curves of the node; they hold for 16-bit weights only."""
        return self.hardware.host_curves if self.work.bytes_per_element == 2 else None

    def product_s(self, rows: float, parameters: float) -> float:
        """Seconds of a projection whose weights are read from memory once."""
        curves = self.curves
        return self._weights_s(rows, parameters, curves.product_flop_per_s if curves else None)

    def network_s(self, rows: float, parameters: float) -> float:
        """Seconds of gated networks with `rows` each and `parameters` in total."""
        curves = self.curves
        return self._weights_s(rows, parameters, curves.expert_flop_per_s if curves else None)

    def between_s(self, rows: float, width: float) -> float:
        """Seconds of norms, rotations and sums that read or write `width` elements per row."""
        if self.curves is None:
            return 0.0
        num_bytes = self.work.bytes_per_element * rows * width
        return num_bytes / self.curves.activation_bytes_per_s

    def roof_s(self, flop: float, num_bytes: float) -> float:
        hardware = self.hardware
        return max(flop / hardware.host_flop_per_s, num_bytes / hardware.host_bytes_per_s)

    def _overhead_s(self) -> float:
        overhead = (self.curves or self.hardware).task_overhead_s
        if overhead is None:
            return TASK_OVERHEAD_S
        more_s = 0.0
        if len(overhead.points) > 1:  # rows of larger steps cost what the last measured ones did
            (tokens, seconds), (largest, last_s) = overhead.points[-2:]
            slope = max(0.0, last_s - seconds) / (largest - tokens)
            more_s = slope * max(0.0, self.shape.tokens - largest)
        return overhead.at(self.shape.tokens) + more_s

    def _weights_s(self, rows: float, parameters: float, curve: Curve | None) -> float:
        if not rows:
            return 0.0
        flop = 2 * rows * parameters
        if curve is not None:
            return flop / curve.at(rows)
        efficiency = rows / (rows + HOST_HALF_EFFICIENCY_ROWS)
        return self.roof_s(flop / efficiency, self.work.bytes_per_element * parameters)


def _embed_s(cost: HostCost, task: Task) -> float:
    del task
    return cost.between_s(cost.shape.tokens, 2 * cost.work.hidden_size)


def _pre_s(cost: HostCost, task: Task) -> float:
    layer, hidden, tokens = cost.work.layers[task.layer], cost.work.hidden_size, cost.shape.tokens
    outputs = layer.pre.parameters // hidden
    return cost.product_s(tokens, layer.pre.parameters) + cost.between_s(
        tokens, 2 * (hidden + outputs)
    )


# Share of the host's bandwidth in a step, and of its operations in prompts, that the kernels of
# states reach: 0.72 to 0.83 and 0.43 to 0.56 were measured (bench/RESULTS.md).
STATE_BYTES_EFFICIENCY, STATE_FLOP_EFFICIENCY = 0.8, 0.4


def state_s(  # noqa: PLR0917 - sizes, then rates
    layer: LayerWork, tokens: float, decode_rows: float, flop_per_s: float, bytes_per_s: float
) -> float:
    """Seconds in which cores read and write a state for each decoding row, and scan all tokens.

    A prompt's state stays in a core's cache.
    """
    bytes_s = 2 * decode_rows * layer.state_bytes / (STATE_BYTES_EFFICIENCY * bytes_per_s)
    flop_s = tokens * layer.state_flop / (STATE_FLOP_EFFICIENCY * flop_per_s)
    return max(bytes_s, flop_s)


def _attention_s(cost: HostCost, task: Task) -> float:
    shape, layer, curves = cost.shape, cost.work.layers[task.layer], cost.curves
    if layer.state_bytes:
        tokens, rows = shape.tokens, shape.decode_rows
        hardware = cost.hardware
        return state_s(layer, tokens, rows, hardware.host_flop_per_s, hardware.host_bytes_per_s)
    if curves is None:
        flop = layer.pair_flop * shape.attention_pairs
        return cost.roof_s(flop, layer.kv_token_bytes * shape.context_tokens)
    seconds = 0.0
    if shape.decode_rows:
        context = shape.decode_pairs / shape.decode_rows
        seconds += shape.decode_pairs * max(
            layer.kv_token_bytes / curves.attention_bytes_per_s.at(context),
            layer.pair_flop / curves.attention_flop_per_s,
        )
    if shape.prefill_tokens:
        # A whole prompt has half as many pairs per token as it has tokens.
        prompt = 2 * shape.prefill_pairs / shape.prefill_tokens
        rate = curves.prefill_flop_per_s.at(prompt)
        seconds += layer.pair_flop * shape.prefill_pairs / rate
    return seconds


def _post_s(cost: HostCost, task: Task) -> float:
    layer, hidden, tokens = cost.work.layers[task.layer], cost.work.hidden_size, cost.shape.tokens
    parameters = layer.post.parameters + layer.router.parameters
    return cost.product_s(tokens, parameters) + cost.between_s(tokens, 4 * hidden)


def _experts_s(cost: HostCost, task: Task) -> float:
    layer, tokens = cost.work.layers[task.layer], cost.shape.tokens
    seconds = cost.network_s(tokens, layer.common.parameters)
    activated = layer.activated_experts(tokens)
    if activated:
        rows = tokens * layer.top_k / activated
        seconds += cost.network_s(rows, activated * layer.expert.parameters)
    return seconds + cost.between_s(tokens, 3 * cost.work.hidden_size)


def _head_s(cost: HostCost, task: Task) -> float:
    del task
    rows, parameters = cost.shape.logit_rows, cost.work.head_parameters
    vocabulary = parameters / cost.work.hidden_size
    return cost.product_s(rows, parameters) + cost.between_s(rows, vocabulary)


_SECONDS: Mapping[Op, Callable[[HostCost, Task], float]] = {
    Op.EMBED: _embed_s,
    Op.PRE: _pre_s,
    Op.ATTN: _attention_s,
    Op.POST: _post_s,
    Op.EXPERTS: _experts_s,
    Op.HEAD: _head_s,
}
