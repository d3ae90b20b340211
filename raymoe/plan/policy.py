"""Sizes of a run and the memory they need."""

from dataclasses import dataclass

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.units import MIB, ceil_div, format_bytes

# MoE-Lens, section 6.5, sends packets of about 100 MB so that small copies slip in between; at 12
# GB/s a page of 64 MiB occupies the link for 5.6 ms.
PAGE_BYTES = 64 * MIB


def blocks_of(tokens: int) -> int:
    """KV blocks that hold so many tokens of a sequence."""
    return ceil_div(tokens, KV_BLOCK_TOKENS)


def window_blocks(window: int) -> int:
    """Most KV blocks that a sequence needs for its next token and the window before it."""
    return blocks_of(window - 1) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePolicy:
    """How a step uses a device that cannot hold the model."""

    # Slices of a step that pass through attention together; schedules whose papers fix it
    # (`builders.MAX_MICRO_BATCHES`) use no more than that.
    num_micro_batches: int = 4
    micro_batches_per_group: int = 1  # micro-batches per expert launch (schedule "micro_batches")
    # Micro-batches whose attention runs ahead of the experts (schedule "micro_batches").
    look_ahead: int = 2
    # Share of the decoding sequences that attend on the CPU, 0..1, in schedules that divide them
    # (omega of MoE-Gen, section 4.3).
    cpu_attention_fraction: float = 1.0
    page_bytes: int = PAGE_BYTES  # largest piece of weights that is sent at once
    resident_bytes: int = 0  # device memory for weights that stay there
    # Groups in which the streamed experts of a layer are loaded and computed; 1 loads whole layers
    # into two slots in turn.
    expert_groups: int = 1
    ring_slots: int = 2  # groups that the device holds at once, if there are several
    # Share of each layer's streamed experts that cores compute, 0..1, while the others cross the
    # link. Above 0, each step takes what is predicted to be fastest: none, this share, or all.
    # Kernels of cores and device round differently: in 16 bits, the results of a row then depend on
    # the steps that it is in, and so on other rows.
    cpu_experts_fraction: float = 0.0
    # Whether every step takes that share, which costs speed, so that rows depend on no other rows.
    is_cpu_experts_fraction_fixed: bool = False
    staging_slots: int = 0  # pages of the pinned ring; 0 if all weights are pinned
    # Whether layers that keep states in place of KV have those of all sequences on the device; the
    # host then attends only in layers with KV.
    states_on_device: bool = False
    # KV blocks per micro-batch on the device; None reserves twice what its prompts need and at
    # least `MIN_STAGED_BLOCKS`
    staged_blocks: int | None = None

    def __post_init__(self) -> None:
        for field, minimum in (
            ("num_micro_batches", 1),
            ("micro_batches_per_group", 1),
            ("look_ahead", 0),
            ("page_bytes", 1),
            ("resident_bytes", 0),
            ("expert_groups", 1),
            ("ring_slots", 1),
            ("staging_slots", 0),
            ("staged_blocks", 0),
        ):
            value = getattr(self, field)
            if field == "staged_blocks" and value is None:
                continue
            if type(value) is not int or value < minimum:
                raise ConfigError(
                    f"DevicePolicy.{field} is {value!r}; it must be an integer >= {minimum}"
                )
        for field in ("cpu_attention_fraction", "cpu_experts_fraction"):
            value = getattr(self, field)
            if not 0 <= value <= 1:
                raise ConfigError(f"DevicePolicy.{field} is {value!r}; 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Sizes of a run; after planning all are set.

    Examples:
        >>> policy = dataclasses.replace(raymoe.find_plan(model, node).policy, max_num_seqs=64)
        >>> raymoe.find_plan(model, node, policy=policy).policy.max_num_seqs
        64

    Attributes:
        max_num_seqs: Live sequences.
        max_num_batched_tokens: Tokens of a step, decode and prefill together.
        max_prefill_chunk_tokens: Prompt tokens of one sequence in one step.
        num_kv_blocks: Blocks of the KV cache.
        steady_admission: Whether rows enter at the rate that the KV cache sustains
            (`job.SteadyAdmission`), not as soon as there is room.
        device: Use of a device with its own memory; None takes the defaults.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk_tokens: int
    num_kv_blocks: int
    steady_admission: bool = False
    device: DevicePolicy | None = None

    def __post_init__(self) -> None:
        for field in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_prefill_chunk_tokens",
            "num_kv_blocks",
        ):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise ConfigError(f"Policy.{field} is {value!r}; it must be a positive integer")

    def num_window_blocks(self, window: int | None) -> int:
        """KV blocks of each layer with a window; 0 if they have `num_kv_blocks`, as all others.

        Enough for the windows of all sequences and of shared prefixes, and for the tokens of a
        step. Where that is no less than all blocks, these layers keep all tokens.

        Args:
            window: Tokens that these layers keep (`ModelSpec.cache_window`).
        """
        if window is None:
            return 0
        num_blocks = self.num_state_slots * window_blocks(window)
        num_blocks += blocks_of(self.max_num_batched_tokens)
        return num_blocks if num_blocks < self.num_kv_blocks else 0

    @property
    def num_state_slots(self) -> int:
        """States that are kept, of models that have any: of sequences, and of shared prefixes."""
        return num_state_slots(self.max_num_seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was planned: a schedule and its sizes."""

    schedule: str
    policy: Policy


MIN_SNAPSHOTS, SEQUENCES_PER_SNAPSHOT = 2, 16


def num_state_slots(max_num_seqs: int) -> int:
    """A state of each sequence, and snapshots where there are others to share a prefix."""
    if max_num_seqs < 2:
        return max_num_seqs
    return max_num_seqs + max(MIN_SNAPSHOTS, ceil_div(max_num_seqs, SEQUENCES_PER_SNAPSHOT))


def max_sequences(num_bytes: int, kv_bytes: int, state_bytes: int) -> int:
    """Sequences for which there is room, with snapshots if there are several.

    Args:
        kv_bytes: KV of a sequence.
        state_bytes: State of a sequence; one of the two is not 0.
    """
    each = kv_bytes + state_bytes + ceil_div(state_bytes, SEQUENCES_PER_SNAPSHOT)
    count = (num_bytes - MIN_SNAPSHOTS * state_bytes) // each
    return count if count > 1 else int(num_bytes >= kv_bytes + state_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Needs of one memory, by purpose."""

    memory: str  # for messages, such as "host memory"
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)

    def bytes_of(self, purpose: str) -> int:
        return dict(self.parts)[purpose]

    def table(self) -> str:
        rows = [*self.parts, ("total", self.total)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}{format_bytes(size):>12}" for name, size in rows)

    def check_fits(self, budget_bytes: int, *, what: str, advice: str) -> None:
        """Raise InfeasiblePlanError with the table if the plan exceeds the budget."""
        if self.total <= budget_bytes:
            return
        raise InfeasiblePlanError(
            f"{what} needs {format_bytes(self.total)} of {self.memory}, "
            f"{format_bytes(budget_bytes)} may be used "
            f"({format_bytes(self.total - budget_bytes)} short):\n{self.table()}\n{advice}"
        )


FEWER_BITS = "a model in fewer bits (raymoe plan --weights fp8 shows what that takes)"
SHORTER_ROWS = (
    "The KV cache of the longest row is too much: plan for shorter rows (max_model_len; raymoe "
    "generate --max-model-len, raymoe plan --max-context), or choose a node with more memory."
)
SMALLER_POLICY = (
    "Reduce num_kv_blocks or max_num_seqs of the policy, leave the policy out, or choose a node "
    "with more memory."
)


SMALLER_ON_DEVICE = (
    "Reduce resident_bytes, max_num_batched_tokens or staged_blocks of the policy, give "
    "it more micro-batches, or leave the policy out."
)
ON_THE_GPU_ALONE = "Let the weights stream (schedule 'auto'), or choose a larger GPU."


def host_advice(footprint: Footprint, budget_bytes: int, of_cache: str) -> str:
    """What to do about host memory that is too small, by what does not fit.

    Args:
        of_cache: What to do where only the KV cache is too much.
    """
    if footprint.total - footprint.bytes_of("KV cache") < budget_bytes:
        return of_cache
    return f"All but the KV cache is too much: choose a node with more memory, or {FEWER_BITS}."
