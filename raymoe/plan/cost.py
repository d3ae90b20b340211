"""Seconds of each task of a pass on host cores: the longer of its operations and its bytes.

Source: the roofline of Williams et al. as MoE-Lightning (ASPLOS 2025), section 3, applies it to one
level of memory; the efficiency of small matrix products is our own measurement.
"""

from dataclasses import dataclass

from raymoe.plan.load import PassLoad
from raymoe.plan.work import ModelWork
from raymoe.schedule.task import Op, Task
from raymoe.specs.hardware import HardwareSpec

# Rows at which a matrix product reaches half of its peak beyond the memory bound: packed bfloat16
# experts reach 0.93 of their best rate at 64 rows and 0.98 at 256.
HALF_EFFICIENCY_ROWS = 5.0
# Interpreter time of a task outside its kernels.
TASK_OVERHEAD_S = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """What a pass holds.

    Attributes:
        tokens: All tokens.
        attention_pairs: Pairs of a query token and a context token that it sees.
        context_tokens: Context tokens whose KV is read, summed over sequences.
        logit_rows: Tokens whose logits are computed.
    """

    tokens: float
    attention_pairs: float
    context_tokens: float
    logit_rows: float

    @classmethod
    def of(cls, load: PassLoad) -> "PassShape":
        """The tokens of a load."""
        decoding = load.decode_rows * load.decode_context
        chunk = min(load.prompt_chunk, load.prompt_tokens) or 1.0
        return cls(
            tokens=load.tokens,
            attention_pairs=decoding + load.prompt_tokens * (chunk + 1) / 2,
            context_tokens=decoding + load.prompt_tokens,
            logit_rows=load.decode_rows + load.prompt_tokens / chunk,
        )

    @classmethod
    def decode(cls, rows: int, context: int) -> "PassShape":
        """One token for each of `rows` sequences that are `context` tokens long."""
        pairs = rows * context
        return cls(tokens=rows, attention_pairs=pairs, context_tokens=pairs, logit_rows=rows)

    @classmethod
    def prefill(cls, rows: int, prompt: int) -> "PassShape":
        """The whole prompt of `rows` sequences."""
        pairs = rows * prompt * (prompt + 1) // 2
        return cls(
            tokens=rows * prompt,
            attention_pairs=pairs,
            context_tokens=rows * prompt,
            logit_rows=rows,
        )


@dataclass(frozen=True, slots=True)
class HostCost:
    """Cost model of a pass whose every task runs on all host cores."""

    work: ModelWork
    hardware: HardwareSpec
    shape: PassShape

    def duration_s(self, task: Task) -> float:
        """See `CostModel`."""
        return TASK_OVERHEAD_S + self._work_s(task)

    def _work_s(self, task: Task) -> float:
        shape, work = self.shape, self.work
        if task.op is Op.EMBED:
            return 0.0
        if task.op is Op.HEAD:
            return self._product_s(shape.logit_rows, work.head_parameters, work.head_parameters)
        layer = work.layers[task.layer]
        if task.op is Op.ATTN:
            return self._longer_s(
                layer.pair_flop * shape.attention_pairs, layer.kv_token_bytes * shape.context_tokens
            )
        if task.op is Op.EXPERTS:
            touched = layer.ffn_parameters_touched(shape.tokens)
            rows = shape.tokens
            if layer.num_experts:
                rows = shape.tokens * layer.top_k / layer.touched_experts(shape.tokens)
            return self._product_s(rows, layer.ffn_token_flop * shape.tokens / (2 * rows), touched)
        half = layer.attention_parameters / 2 + layer.router_parameters * (task.op is Op.POST)
        return self._product_s(shape.tokens, half, half)

    def _product_s(self, rows: float, parameters: float, parameters_read: float) -> float:
        efficiency = rows / (rows + HALF_EFFICIENCY_ROWS)
        flop = 2 * rows * parameters / efficiency if rows else 0.0
        return self._longer_s(flop, self.work.bytes_per_element * parameters_read)

    def _longer_s(self, flop: float, num_bytes: float) -> float:
        hardware = self.hardware
        return max(flop / hardware.host_flop_per_s, num_bytes / hardware.host_bytes_per_s)
