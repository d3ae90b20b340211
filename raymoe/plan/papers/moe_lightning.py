"""Policies of MoE-Lightning, as its released optimizer chooses them with its own constants.

Source: MoE-Lightning (ASPLOS 2025), section 4.2, equations 12 to 14, and the optimizer of its
artifact (github.com/caoshiyi/artifacts, branch asplos25), whose memory terms the paper does not
print. There, each micro-batch size and count is a linear program with one free variable, the
resident share, so the optimum has a closed form: the largest share that fits.

Its errors and omissions are kept, because the published policies follow from them:

- Its GB are 2^30 bytes: the link is 17.2 GB/s, where its own figure 9 measures 12.35.
- CPU attention counts one product of two, at data-sheet bandwidths (76 GiB/s where figure 9
  measures 45 to 48 GB/s), and every row has its final length.
- All experts are read again for every micro-batch. Projections, head, sampling, copies of hidden
  states and the copy to pinned memory take no time.
- Prefill takes memory but no time: the objective is decoding alone. Its rate counts the token that
  prefill generates but not the step that generates it.
- The engine truncates the resident share to whole experts: none of 8 in any published row.
- With attention on the GPU, the KV of the whole batch has to fit there while decoding.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.papers.hrm import (
    BYTES_PER_ELEMENT,
    Hierarchy,
    Level,
    PaperModel,
    decode_attention,
    expert_ffn,
)
from raymoe.plan.work import Operation
from raymoe.specs.hardware import HardwareSpec
from raymoe.units import GIB, TB, format_bytes

GPU_SHARE, HOST_SHARE = 0.86, 0.8  # usable share of GPU and host memory
SCRATCH_SLACK = 1.2  # factor on the scratch of the fused experts while prefilling
# Digits of the solver's printed solution. Where the GPU limits, the rate is the same for any count
# of micro-batches, and rounding decides where the scan of counts stops.
SOLVER_DIGITS = 8

# Cores and the last two rates are not in the optimizer. The L4 host's free memory is from the log
# in the artifact's README; for the T4 host, 185.4 to 185.6 GiB give all of its policies.
L4 = HardwareSpec(
    name="L4 of MoE-Lightning",
    num_cores=24,
    host_memory_bytes=197_880_360_960,
    host_bytes_per_s=76 * GIB,
    host_flop_per_s=1.6 * TB,
    gpu_memory_bytes=24 * GIB,
    gpu_bytes_per_s=285 * GIB,
    gpu_flop_per_s=104 * TB,
    htod_bytes_per_s=16 * GIB,
    dtoh_bytes_per_s=16 * GIB,
    host_copy_bytes_per_s=76 * GIB / 3,
)
T4 = replace(
    L4,
    name="T4 of MoE-Lightning",
    host_memory_bytes=int(185.5 * GIB),
    host_bytes_per_s=100 * GIB,
    host_flop_per_s=0.8 * TB,
    gpu_memory_bytes=15 * GIB,
    gpu_bytes_per_s=300 * GIB,
    gpu_flop_per_s=65 * TB,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningPolicy:
    """A policy and its predicted times.

    Source: MoE-Lightning, section 4.2: the tuple (N, mu, A_g, F_g, r_w, r_c). The optimizer runs
    experts on the GPU only, F_g = 1, and keeps KV where attention runs, r_c = A_g.
    """

    micro_batch_size: int
    num_micro_batches: int
    resident_fraction: float  # r_w: share of the experts that stays on the GPU
    is_attention_on_gpu: bool
    host_bytes: float
    link_s: float  # link time of one layer of a decode step
    gpu_s: float  # GPU time of one layer of a decode step
    cpu_s: float  # CPU time of one layer of a decode step
    prefill_s: float  # all layers of the prefill by its formulas; not in its objective
    decode_s: float
    tokens_per_s: float  # its objective: generated tokens over the time of decoding alone

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size * self.num_micro_batches

    @property
    def end_to_end_tokens_per_s(self) -> float:
        return self.tokens_per_s * self.decode_s / (self.prefill_s + self.decode_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningOptimizer:
    """The optimizer for one model, node and workload; all rows have the same lengths.

    Raises:
        ConfigError: Fewer than three layers or two generated tokens, which the formulas exclude.
    """

    model: PaperModel
    hardware: HardwareSpec
    prompt_tokens: int
    generated_tokens: int
    # Whether the residual stream of all rows stays on the GPU while prefilling, as in the released
    # optimizer; the padded rows of the L4 were planned without.
    keeps_residual: bool = True
    # A_g: the paper tries both, the released optimizer has it off.
    is_attention_on_gpu: bool = False
    # Tensor-parallel GPUs: memory and rates of one GPU are multiplied, the link is not. Each GPU
    # holds the hidden states of all rows.
    num_gpus: int = 1

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ConfigError(f"MoE-Lightning: num_gpus is {self.num_gpus}; it is at least 1")
        if self.model.num_layers < 3 or self.generated_tokens < 2:
            raise ConfigError(
                f"MoE-Lightning: {self.model.num_layers} layers and {self.generated_tokens} "
                "generated tokens; it needs at least 3 and 2"
            )

    def best(self, micro_batch_sizes: Iterable[int] | None = None) -> LightningPolicy:
        """The policy with the best decode rate; among equals the last one tried.

        Source: the scan of the artifact's optimizer. By default mu is 1, 2, 3, 4, 36, 68, ... while
        a single micro-batch fits. Raises InfeasiblePlanError if the first does not.
        """
        best: LightningPolicy | None = None
        sizes = chain(range(1, 4), count(4, 32)) if micro_batch_sizes is None else micro_batch_sizes
        for size in sizes:
            if self.policy(size, 1) is None:
                break
            for policy in self._while_rising(size):
                if best is None or policy.tokens_per_s >= best.tokens_per_s:
                    best = policy
        if best is None:
            raise InfeasiblePlanError(self._refusal())
        return best

    def policy(self, micro_batch_size: int, num_micro_batches: int) -> LightningPolicy | None:
        low, high = self._resident_range(micro_batch_size, num_micro_batches)
        resident = min(1.0, high)
        if resident < max(0.0, low):
            return None
        return self.evaluate(micro_batch_size, num_micro_batches, resident)

    def evaluate(
        self, micro_batch_size: int, num_micro_batches: int, resident_fraction: float
    ) -> LightningPolicy:
        """Times of a policy, whether or not it fits (section 4.2, equations 12 to 14)."""
        model, batch = self.model, micro_batch_size * num_micro_batches
        levels = self._levels
        ffn = expert_ffn(model, batch, micro_batch_size, resident_fraction=resident_fraction)
        attention = decode_attention(model, self._context_tokens, products=1)
        on_gpu = self.is_attention_on_gpu
        place = levels.near if on_gpu else levels.far
        attention_s = batch * place.seconds(attention.flop, attention.near_bytes)
        link_s = ffn.far_bytes / levels.link_bytes_per_s
        gpu_s = levels.near.seconds(ffn.flop, ffn.near_bytes) + on_gpu * attention_s
        cpu_s = (not on_gpu) * attention_s
        layer_s = float(f"{max(link_s, gpu_s, cpu_s):.{SOLVER_DIGITS}g}")
        decode_s = layer_s * model.num_layers * (self.generated_tokens - 1)
        return LightningPolicy(
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            resident_fraction=resident_fraction,
            is_attention_on_gpu=on_gpu,
            host_bytes=self._host_bytes(batch) + ffn.far_bytes * (model.num_layers + 2),
            link_s=link_s,
            gpu_s=gpu_s,
            cpu_s=cpu_s,
            prefill_s=self._prefill_s(micro_batch_size, batch, ffn.far_bytes),
            decode_s=decode_s,
            tokens_per_s=batch * self.generated_tokens / decode_s,
        )

    @property
    def _levels(self) -> Hierarchy:
        one = Hierarchy.of(self.hardware)
        near = Level(self.num_gpus * one.near.flop_per_s, self.num_gpus * one.near.bytes_per_s)
        return replace(one, near=near)

    @property
    def _context_tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens

    def _while_rising(self, micro_batch_size: int) -> Iterator[LightningPolicy]:
        before = 0.0
        for number in count(1):
            policy = self.policy(micro_batch_size, number)
            if policy is None or policy.tokens_per_s < before:
                return
            yield policy
            before = policy.tokens_per_s

    def _prefill_s(self, micro_batch_size: int, batch: int, streamed_bytes: float) -> float:
        model, tokens, levels = self.model, self.prompt_tokens, self._levels
        hidden = BYTES_PER_ELEMENT * batch * tokens * model.hidden_size
        link_s = (streamed_bytes + hidden) / levels.link_bytes_per_s
        ffn = expert_ffn(model, batch * tokens, micro_batch_size * tokens)
        attention = self._prompt_attention()
        gpu_s = levels.near.seconds(ffn.flop, ffn.near_bytes)
        gpu_s += batch * levels.near.seconds(attention.flop, attention.near_bytes)
        return model.num_layers * max(link_s, gpu_s)

    def _prompt_attention(self) -> Operation:
        tokens, one = (
            self.prompt_tokens,
            decode_attention(self.model, self.prompt_tokens, products=1),
        )
        other_queries = 2 * BYTES_PER_ELEMENT * (tokens - 1) * self.model.query_width
        num_bytes = one.near_bytes + other_queries
        return Operation(
            name="prompt attention", flop=tokens * one.flop, near_bytes=num_bytes, far_bytes=0.0
        )

    def _resident_range(self, micro_batch_size: int, num_micro_batches: int) -> tuple[float, float]:
        """Least resident share for the host, largest for the GPU; negative or crossed: no fit.

        Source: the memory constraints of the artifact's optimizer. Both sides buffer two streamed
        layers: slots on the GPU, pinned memory on the host.
        """
        model, batch = self.model, micro_batch_size * num_micro_batches
        layer, layers = model.layer_expert_bytes, model.num_layers
        gpu = GPU_SHARE * self.num_gpus * self.hardware.gpu_memory_bytes
        gpu -= self._gpu_bytes(micro_batch_size, batch)
        host = HOST_SHARE * self.hardware.host_memory_bytes - self._host_bytes(batch)
        return 1 - host / (layer * (layers + 2)), (gpu - 2 * layer) / (layer * (layers - 2))

    def _gpu_bytes(self, micro_batch_size: int, batch: int) -> float:
        model, prompt = self.model, micro_batch_size * self.prompt_tokens
        row = self.num_gpus * BYTES_PER_ELEMENT * model.hidden_size
        decode = 2.0 * row * batch
        if self.is_attention_on_gpu:
            decode += self._cache_bytes(batch)
            cache = model.kv_token_bytes * batch * self.prompt_tokens
        else:
            cache = 2 * model.kv_token_bytes * prompt
        if self.keeps_residual:
            prefill = 2 * row * prompt + row * batch * self.prompt_tokens + cache
        else:
            prefill = 4 * row * prompt + cache
        width = model.top_k * (row + 3 * BYTES_PER_ELEMENT * model.expert_hidden)
        return model.dense_bytes_all + max(decode, prefill) + SCRATCH_SLACK * prompt * width

    def _host_bytes(self, batch: int) -> float:
        row = self.num_gpus * BYTES_PER_ELEMENT * self.model.hidden_size
        hidden = batch * self.prompt_tokens * row
        return hidden + (0 if self.is_attention_on_gpu else self._cache_bytes(batch))

    def _cache_bytes(self, batch: int) -> float:
        return batch * self._context_tokens * self.model.kv_token_bytes_all

    def _refusal(self) -> str:
        low, high = self._resident_range(1, 1)
        layer, layers = self.model.layer_expert_bytes, self.model.num_layers
        gpu = max(0.0, -high * layer * (layers - 2))
        host = max(0.0, (low - min(1.0, max(0.0, high))) * layer * (layers + 2))
        return (
            f"MoE-Lightning: one row of {self._context_tokens} tokens does not fit "
            f"{self.hardware.name}: {format_bytes(gpu)} of GPU memory and {format_bytes(host)} of "
            "host memory short. Take shorter prompts or a node with more memory."
        )
