"""find_plan: the sizes of a run, what it needs and how fast it will be.

This is the search for the device `cpu`: all weights are where the work is, so batch and pass sizes
are what there is to choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from raymoe.plan.cost import HostCost, PassShape
from raymoe.plan.footprint import Footprint
from raymoe.plan.policy import Policy
from raymoe.plan.work import ModelWork
from raymoe.schedule.builders.in_place import build_in_place
from raymoe.schedule.graph import Schedule
from raymoe.schedule.simulate import simulate
from raymoe.schedule.timeline import Timeline
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec, MoeSpec
from raymoe.specs.workload import Workload
from raymoe.units import GIB, ceil_div, format_bytes, format_seconds

KV_BLOCK_TOKENS = 32
RUNTIME_BYTES = GIB  # interpreter, torch, tokenizer, request state
LOGIT_CHUNK_ROWS = 256
PASS_TOKENS = (512, 1024, 2048, 4096, 8192)
BATCH_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
# The smallest size that comes this close to the best is chosen: more tokens in a pass cost a few
# megabytes, more sequences cost gigabytes of KV cache.
GOOD_PASS, GOOD_BATCH = 0.995, 0.98
DEFAULT_WORKLOAD = Workload(num_rows=2048, prompt_tokens=256, generated_tokens=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A policy, its schedule, and what they will need and take.

    Attributes:
        decode: Predicted timeline of a pass in which every live sequence decodes one token.
        prefill: Predicted timeline of a pass full of prompt tokens.
    """

    model_name: str
    hardware: HardwareSpec
    workload: Workload
    policy: Policy
    schedule: Schedule
    footprint: Footprint
    decode: Timeline
    prefill: Timeline

    @property
    def prefill_tokens_per_s(self) -> float:
        """Predicted prompt tokens per second."""
        return self.policy.pass_tokens / self.prefill.makespan_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Predicted generated tokens per second while decoding."""
        return self.policy.batch_size / self.decode.makespan_s

    @property
    def tokens_per_s(self) -> float:
        """Predicted generated tokens per second, prefill included."""
        seconds_per_row = (
            self.workload.prompt_tokens / self.prefill_tokens_per_s
            + self.workload.generated_tokens / self.decode_tokens_per_s
        )
        return self.workload.generated_tokens / seconds_per_row

    def describe(self) -> str:
        """The plan for people: policy, footprint, prediction."""
        policy, workload = self.policy, self.workload
        eta_s = workload.num_rows * workload.generated_tokens / self.tokens_per_s
        return (
            f"{self.model_name} on {self.hardware.name} ({self.hardware.num_cores} cores, "
            f"{format_bytes(self.hardware.host_memory_bytes)})\n"
            f"policy: schedule {self.schedule.name}, batch {policy.batch_size} sequences, "
            f"{policy.pass_tokens} tokens per pass, {policy.num_kv_blocks} KV blocks of "
            f"{KV_BLOCK_TOKENS} tokens\n"
            f"host memory:\n{self.footprint.table()}\n"
            f"predicted: prefill {self.prefill_tokens_per_s:.0f} tokens/s, "
            f"decode {self.decode_tokens_per_s:.0f} tokens/s, "
            f"end to end {self.tokens_per_s:.0f} generated tokens/s at "
            f"{workload.prompt_tokens} + {workload.generated_tokens} tokens; "
            f"{workload.num_rows} rows in {format_seconds(eta_s)}"
        )


def find_plan(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload | None = None,
    *,
    policy: Policy | None = None,
    bytes_per_element: int = 2,
    kv_bytes_per_element: int | None = None,
    weight_bytes: int | None = None,
    max_context_tokens: int | None = None,
) -> Plan:
    """Choose the policy, or check the given one, and predict what it does.

    Args:
        model: The model.
        hardware: The node, with the host memory that may be used.
        workload: Rows to plan for; a typical job where it is not known.
        policy: Taken as it is.
        bytes_per_element: Of the weights as the kernels read them.
        kv_bytes_per_element: Of the KV cache; that of the weights by default.
        weight_bytes: Exact bytes of all weights in kernel form; estimated by default.
        max_context_tokens: Longest sequence; the model's by default.

    Raises:
        InfeasiblePlanError: The plan needs more memory than there is; shows what needs what.
    """
    workload = workload or DEFAULT_WORKLOAD
    work = ModelWork.of(model, bytes_per_element)
    sizes = _Sizes(
        model=model,
        weights=model.weight_bytes(bytes_per_element) if weight_bytes is None else weight_bytes,
        bytes_per_element=bytes_per_element,
        block_bytes=KV_BLOCK_TOKENS
        * model.kv_bytes_per_token(kv_bytes_per_element or bytes_per_element),
    )
    context = min(max_context_tokens or model.max_context_tokens, model.max_context_tokens)
    chosen = policy or _choose(work, hardware, workload, sizes=sizes, context=context)
    footprint = sizes.footprint(chosen)
    footprint.check_fits(hardware.host_memory_bytes, what=model.name)
    schedule = build_in_place(model.num_layers)
    full = _prefill(chosen.pass_tokens, workload)
    return Plan(
        model_name=model.name,
        hardware=hardware,
        workload=workload,
        policy=chosen,
        schedule=schedule,
        footprint=footprint,
        decode=simulate(schedule, HostCost(work, hardware, _decode(chosen.batch_size, workload))),
        prefill=simulate(schedule, HostCost(work, hardware, full)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of the parts of a footprint."""

    model: ModelSpec
    weights: int
    bytes_per_element: int
    block_bytes: int

    def activations(self, pass_tokens: int) -> int:
        """Hidden states, projections, routed rows of the widest layer, and a chunk of logits."""
        widest = 0
        for layer in self.model.layers:
            attention, ffn = layer.attention, layer.ffn
            width = 2 * (attention.query_width + attention.cache_width)
            if isinstance(ffn, MoeSpec):
                width += ffn.top_k * (ffn.expert_hidden + self.model.hidden_size)
            else:
                width += 2 * ffn.hidden
            widest = max(widest, width)
        per_token = self.bytes_per_element * (widest + 5 * self.model.hidden_size)
        logits = 3 * 4 * LOGIT_CHUNK_ROWS * self.model.vocab_size
        return pass_tokens * per_token + logits

    def footprint(self, policy: Policy) -> Footprint:
        """The footprint of a policy."""
        return Footprint(
            weights=self.weights,
            kv_cache=policy.num_kv_blocks * self.block_bytes,
            activations=self.activations(policy.pass_tokens),
            runtime=RUNTIME_BYTES,
        )


def _choose(
    work: ModelWork, hardware: HardwareSpec, workload: Workload, *, sizes: _Sizes, context: int
) -> Policy:
    schedule = build_in_place(len(work.layers))

    def rate(shape: PassShape) -> float:
        return shape.tokens / simulate(schedule, HostCost(work, hardware, shape)).makespan_s

    prefill_rates = [rate(_prefill(tokens, workload)) for tokens in PASS_TOKENS]
    pass_tokens = _smallest_good(PASS_TOKENS, prefill_rates, GOOD_PASS)
    floor = Footprint(
        weights=sizes.weights,
        kv_cache=ceil_div(context, KV_BLOCK_TOKENS) * sizes.block_bytes,
        activations=sizes.activations(pass_tokens),
        runtime=RUNTIME_BYTES,
    )
    floor.check_fits(hardware.host_memory_bytes, what=f"{sizes.model.name} with one sequence")
    free_bytes = hardware.host_memory_bytes - floor.total + floor.kv_cache
    blocks = free_bytes // sizes.block_bytes
    most = max(1, blocks // ceil_div(workload.context_tokens, KV_BLOCK_TOKENS))
    batches = [size for size in BATCH_SIZES if size <= min(most, pass_tokens)] or [most]
    decode_rates = [rate(_decode(size, workload)) for size in batches]
    batch = _smallest_good(batches, decode_rates, GOOD_BATCH)
    return Policy(
        batch_size=batch,
        pass_tokens=pass_tokens,
        prefill_chunk_tokens=pass_tokens,
        num_kv_blocks=min(blocks, batch * ceil_div(_roomy(workload, context), KV_BLOCK_TOKENS)),
    )


def _roomy(workload: Workload, context: int) -> int:
    """Tokens per sequence beyond which a larger cache would mostly stay empty."""
    return min(context, 2 * workload.context_tokens)


def _prefill(pass_tokens: int, workload: Workload) -> PassShape:
    rows = max(1, pass_tokens // workload.prompt_tokens)
    return PassShape.prefill(rows, pass_tokens // rows)


def _decode(batch_size: int, workload: Workload) -> PassShape:
    mean_context = workload.prompt_tokens + workload.generated_tokens // 2
    return PassShape.decode(batch_size, mean_context)


def _smallest_good(sizes: Sequence[int], rates: Sequence[float], share: float) -> int:
    least = share * max(rates)
    return next(size for size, rate in zip(sizes, rates, strict=True) if rate >= least)
