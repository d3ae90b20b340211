"""MoE-Gen: step time as the critical path of a graph of modules, and the policy search.

Source: MoE-Gen (2025), section 4.4 and figure 6.

Assumptions:
- Copies to the device are in order: dense weights, KV, experts, layer by layer. Copies to the host
  are hidden.
- Experts run one after the other (section 4.2), each after its copy, whether chosen or not.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.papers.hrm import BYTES_PER_ELEMENT, Hierarchy, PaperModel
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.workload import Workload
from raymoe.units import format_bytes

KV_BUFFERS = 2
# The first layers fill the pipeline; all later ones take as long as the last of these.
WALKED_LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes:
    """Seconds of the nodes of one layer (MoE-Gen, section 4.4, figure 6)."""

    dense_copy: float  # weights other than experts, to the device
    pre: float
    kv_copy: tuple[float, ...]  # KV of each attention launch, to the device
    device_attention: tuple[float, ...]
    cpu_attention: float  # attention of the CPU's rows
    post: float  # work after attention, router included
    expert_copy: float  # one expert, to the device
    expert: float  # one expert, all of its launches


@dataclass(slots=True)
class _Graph:
    ends: list[float] = field(default_factory=list)

    def add(self, cost: float, *after: int) -> int:
        """Add a node after others (MoE-Gen, section 4.4, equation 4)."""
        self.ends.append(max((self.ends[node] for node in after), default=0.0) + cost)
        return len(self.ends) - 1


def critical_path_s(
    times: ModuleTimes, *, num_layers: int, num_experts: int, expert_slots: int
) -> float:
    """Longest path of a step (section 4.4, figure 6, equation 4; section 4.2 for buffers)."""
    ends = list(_layer_ends(times, min(num_layers, WALKED_LAYERS), num_experts, expert_slots))
    if num_layers <= WALKED_LAYERS:
        return ends[-1]
    return ends[-1] + (num_layers - WALKED_LAYERS) * (ends[-1] - ends[-2])


def _layer_ends(
    times: ModuleTimes, num_layers: int, num_experts: int, expert_slots: int
) -> Iterator[float]:
    """Yield when the last expert of each layer ends.

    A copy waits for the previous copy and for its buffer; dense weights have one buffer, which is
    free after `post`.
    """
    graph = _Graph()
    link = gpu = cpu = post = graph.add(0.0)
    attended: list[int] = []
    experts: list[int] = []
    for _ in range(num_layers):
        link = graph.add(times.dense_copy, link, post)
        gpu = graph.add(times.pre, gpu, link)
        cpu = graph.add(times.cpu_attention, cpu, gpu)
        for copy_s, attention_s in zip(times.kv_copy, times.device_attention, strict=True):
            link = graph.add(copy_s, link, *_that_frees(KV_BUFFERS, attended))
            gpu = graph.add(attention_s, gpu, link)
            attended.append(gpu)
        gpu = post = graph.add(times.post, gpu, cpu)
        for _ in range(num_experts):
            link = graph.add(times.expert_copy, link, *_that_frees(expert_slots, experts))
            gpu = graph.add(times.expert, gpu, link)
            experts.append(gpu)
        yield graph.ends[gpu]


def _that_frees(num_buffers: int, readers: list[int]) -> list[int]:
    return [readers[-num_buffers]] if len(readers) >= num_buffers else []


# Table 10 gives omega in tenths.
CPU_FRACTIONS = tuple(tenths / 10 for tenths in range(11))
# Figure 3 finds the GPU saturated from 2^10 on; the code never launches more.
EXPERT_BATCH = 2048
# Makes the two KV buffers a 128th of one layer's KV; smaller ones gain nothing.
MAX_LAUNCHES = 256
# Our estimate: a handful of kernels per module, 5 to 10 microseconds each.
LAUNCH_S = 30e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GenPolicy:
    """One point of the search space (MoE-Gen, section 4.3, table 2)."""

    batch_size: int  # B: rows per expert launch
    attention_batch: int  # b_a: rows of an attention launch on the GPU
    expert_batch: int  # b_e: tokens of a launch of one expert
    cpu_attention_fraction: float  # omega: share of the rows that attend on the CPU
    expert_slots: int
    resident_fraction: float = 0.0  # S_Params over all weights: share that is never copied


@dataclass(frozen=True, slots=True, kw_only=True)
class GenPlan:
    policy: GenPolicy
    step_s: float
    tokens_per_s: float  # generated tokens while decoding, prompt tokens while prefilling


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowTokens:
    """Per row: tokens of the step, attended pairs and tokens held in the cache."""

    tokens: int
    pairs: float
    kv_tokens: float
    is_decode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GenSearch:
    """The search of section 4.4 for one model, node and workload."""

    model: PaperModel
    hardware: HardwareSpec
    workload: Workload
    # KV bandwidth of CPU attention; 0 without a kernel, as for MLA in MoE-Gen.
    cpu_attention_bytes_per_s: float
    # Whether spare device memory keeps weights (S_Params); the released code copies all of them in
    # every step.
    keeps_parameters: bool = True

    def decode(self, cpu_attention_fraction: float | None = None) -> GenPlan:
        """The plan with the highest decode rate; the host's capacity sets the batch.

        Source: MoE-Gen, section 4.3, equations 1 to 3. Searches omega if it is None. Raises
        InfeasiblePlanError if the host does not hold one row, or the device one launch.
        """
        fractions = CPU_FRACTIONS if self.cpu_attention_bytes_per_s else (0.0,)
        if cpu_attention_fraction is not None:
            fractions = (cpu_attention_fraction,)
        context = self.workload.prompt_tokens + self.workload.generated_tokens / 2
        work = _RowTokens(tokens=1, pairs=context, kv_tokens=context, is_decode=True)
        batch = min(self.workload.num_rows, self.host_rows)
        return self._best(work, ((batch, fraction) for fraction in fractions))

    def prefill(self, batch_size: int | None = None) -> GenPlan:
        """The plan with the highest prefill rate; all attention on the GPU, no KV copied back.

        Searches the rows of a step if `batch_size` is None; the released code has constants.

        Source: MoE-Gen, section 4.3, P-D disaggregation. Raises as `decode` does.
        """
        prompt = self.workload.prompt_tokens
        work = _RowTokens(
            tokens=prompt, pairs=prompt * (prompt + 1) / 2, kv_tokens=prompt, is_decode=False
        )
        rows = min(self.workload.num_rows, self.host_rows)
        batches = _doubling(rows) if batch_size is None else (min(batch_size, rows),)
        return self._best(work, ((batch, 0.0) for batch in batches))

    @property
    def host_rows(self) -> int:
        """Rows whose KV fits next to the model (4.3, equation 2); InfeasiblePlanError if none."""
        row_bytes = self.workload.context_tokens * self.model.kv_token_bytes_all
        spare = self.hardware.host_memory_bytes - self.model.weight_bytes
        if spare < row_bytes:
            raise InfeasiblePlanError(
                f"MoE-Gen: {format_bytes(self.model.weight_bytes)} of weights and one row's "
                f"{format_bytes(row_bytes)} of KV are {format_bytes(row_bytes - spare)} more than "
                f"the host memory of {self.hardware.name}"
            )
        return int(spare / row_bytes)

    def _best(self, work: _RowTokens, batches: Iterable[tuple[int, float]]) -> GenPlan:
        plans = (
            self._plan(work, policy)
            for batch, fraction in batches
            for policy in self._policies(work, batch, fraction)
        )
        best = max(plans, key=lambda plan: plan.tokens_per_s, default=None)
        if best is None:
            raise InfeasiblePlanError(
                f"MoE-Gen: one launch does not fit the "
                f"{format_bytes(self.hardware.gpu_memory_bytes)} of device memory of "
                f"{self.hardware.name}; its smallest buffers need "
                f"{format_bytes(self._device_bytes(work, self._smallest))}"
            )
        return best

    @property
    def _smallest(self) -> GenPolicy:
        return GenPolicy(
            batch_size=1,
            attention_batch=1,
            expert_batch=1,
            cpu_attention_fraction=0.0,
            expert_slots=1,
        )

    def _policies(self, work: _RowTokens, batch: int, fraction: float) -> Iterator[GenPolicy]:
        on_device = batch - round(batch * fraction)
        tokens = batch * work.tokens * self.model.top_k / self.model.num_experts
        for attention_batch in _halving(max(1, on_device)):
            for slots in _doubling(self.model.num_experts):
                policy = GenPolicy(
                    batch_size=batch,
                    attention_batch=attention_batch,
                    expert_batch=min(EXPERT_BATCH, ceil(tokens)),
                    cpu_attention_fraction=fraction,
                    expert_slots=slots,
                )
                spare = self.hardware.gpu_memory_bytes - self._device_bytes(work, policy)
                if spare >= 0:
                    kept = min(1.0, spare / self.model.weight_bytes) * self.keeps_parameters
                    yield replace(policy, resident_fraction=kept)
            if not on_device:
                return

    def _device_bytes(self, work: _RowTokens, policy: GenPolicy) -> float:
        """Device memory apart from resident weights (MoE-Gen, section 4.3, equation 3)."""
        model = self.model
        kv_tokens = self.workload.context_tokens if work.is_decode else work.tokens
        cache = 0.0
        if policy.cpu_attention_fraction < 1:
            cache = KV_BUFFERS * policy.attention_batch * kv_tokens * model.kv_token_bytes
        rows = 2 * policy.batch_size * work.tokens * model.hidden_size
        attention = 2 * policy.attention_batch * work.tokens * model.query_width
        experts = policy.expert_batch * (model.hidden_size + 3 * model.expert_hidden)
        return (
            policy.expert_slots * model.expert_bytes
            + model.layer_dense_bytes
            + cache
            + BYTES_PER_ELEMENT * (rows + attention + experts)
        )

    def _plan(self, work: _RowTokens, policy: GenPolicy) -> GenPlan:
        step_s = critical_path_s(
            self._times(work, policy),
            num_layers=self.model.num_layers,
            num_experts=self.model.num_experts,
            expert_slots=policy.expert_slots,
        )
        tokens = policy.batch_size * work.tokens
        return GenPlan(policy=policy, step_s=step_s, tokens_per_s=tokens / step_s)

    def _times(self, work: _RowTokens, policy: GenPolicy) -> ModuleTimes:
        model, levels = self.model, Hierarchy.of(self.hardware)
        streamed = (1 - policy.resident_fraction) / levels.link_bytes_per_s
        tokens = policy.batch_size * work.tokens
        projection_s = LAUNCH_S + levels.near.seconds(
            model.dense_flop(tokens) / 2, self._near_bytes(model.layer_dense_bytes / 2)
        )
        cpu_rows = round(policy.batch_size * policy.cpu_attention_fraction)
        rows_of = tuple(_slices(policy.batch_size - cpu_rows, policy.attention_batch))
        row_kv = work.kv_tokens * model.kv_token_bytes
        row_flop = work.pairs * model.pair_flop
        return ModuleTimes(
            dense_copy=model.layer_dense_bytes * streamed,
            pre=projection_s,
            kv_copy=tuple(
                rows * row_kv * work.is_decode / levels.link_bytes_per_s for rows in rows_of
            ),
            device_attention=tuple(
                LAUNCH_S + levels.near.seconds(rows * row_flop, rows * row_kv) for rows in rows_of
            ),
            cpu_attention=cpu_rows * row_kv / self.cpu_attention_bytes_per_s if cpu_rows else 0.0,
            post=projection_s,
            expert_copy=model.layer_expert_bytes / model.num_experts * streamed,
            expert=self._expert_s(tokens, policy.expert_batch),
        )

    def _expert_s(self, tokens: int, expert_batch: int) -> float:
        model = self.model
        num_bytes = model.layer_expert_bytes / model.num_experts
        launches = ceil(tokens * model.top_k / model.num_experts / expert_batch)
        flop = model.expert_flop(tokens) / model.num_experts
        near = Hierarchy.of(self.hardware).near
        return launches * LAUNCH_S + near.seconds(flop, self._near_bytes(num_bytes, launches))

    def _near_bytes(self, num_bytes: float, launches: int = 1) -> float:
        """Bytes of weights that launches read; 8 bits are read once and written as 16 before."""
        if self.model.bytes_per_weight == BYTES_PER_ELEMENT:
            return launches * num_bytes
        wide = num_bytes * BYTES_PER_ELEMENT / self.model.bytes_per_weight
        return num_bytes + (1 + launches) * wide


def _doubling(maximum: int) -> Iterator[int]:
    size = 1
    while size < maximum:
        yield size
        size *= 2
    yield maximum


def _halving(maximum: int) -> Iterator[int]:
    launches = 1
    while launches <= min(maximum, MAX_LAUNCHES):
        yield ceil(maximum / launches)
        launches *= 2


def _slices(rows: int, size: int) -> Iterator[int]:
    for start in range(0, rows, size):
        yield min(size, rows - start)
