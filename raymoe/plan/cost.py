"""Seconds of each task of a step: work over the rates of cores, GPU and link.

Assumptions:
- Without measured curves, a task takes the longer of operations and bytes at its resource's best
  rates (the roofline of Williams et al., as in MoE-Lightning (ASPLOS 2025), section 3). The
  efficiency of small products on cores is our own measurement.
- A step reads the expected number of distinct experts (independent choices); each gets the mean
  number of rows.
- While weights stream, the link takes its bytes from host memory and CPU tasks get the rest
  (MoE-Lens, section 5.3, equation 5), at least half. Where cores compute experts, they have all of
  it once the link has nothing left to copy.
- While the CPU reads KV or experts, the link is slower (MoE-Lens, section 13).
- On a measured node, products, attention and elementwise work of 16-bit models run at measured
  rates, which hold for one shape of matrix, expert and head (`HostCurves`, `DeviceCurves`) and
  serve for all; attention of cores at that rate times the share of bandwidth that the link leaves.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from raymoe.errors import ConfigError
from raymoe.plan.work import STREAM_VISITS, LayerWork, Matrices, MicroBatchShape, ModelWork
from raymoe.schedule.graph import Op, Resource, Schedule, Task
from raymoe.schedule.placement import LayerPlacement
from raymoe.specs.attention.work import AttentionShape, AttentionWork, Choice
from raymoe.specs.hardware import Curve, DeviceCurves, HardwareSpec, HostCurves
from raymoe.units import ceil_div

# Rows at which a matrix product on cores reaches half of its peak beyond the memory bound: packed
# bfloat16 experts reach 0.93 of their best rate at 64 rows and 0.98 at 256.
HOST_HALF_EFFICIENCY_ROWS = 5.0
# The same on a GPU; gives 0.94 at 2^10 tokens per expert, where MoE-Gen, figure 3, finds the GPU
# saturated.
GPU_HALF_EFFICIENCY_ROWS = 64.0
# Elements of quantised experts that a core decodes before it multiplies.
DECODED_ELEMENTS_PER_CORE_S = 1e8
# Share of host read bandwidth: our attention kernel reads KV at 0.84 to 0.93.
CPU_ATTENTION_EFFICIENCY = 0.85
# Share of the host's bandwidth in a step, and of its operations in prompts, that the kernels of
# states reach: 0.72 to 0.83 and 0.43 to 0.56 were measured (bench/RESULTS.md).
STATE_BYTES_EFFICIENCY, STATE_FLOP_EFFICIENCY = 0.8, 0.4
# Share of the rate of products that scores of an indexer reach, by our estimate: float32, and
# multiplied and added in two steps on cores.
INDEX_FLOP_SHARE = 0.25
# Share of the link's rate while the CPU reads KV: MoE-Lens, section 13, sees weights take 6 s
# instead of 5 alongside 210 GB of KV, which that host reads in 1.9 s by the formulas here.
BUSY_LINK_SHARE = 0.5
# Staging reads the pageable original and writes the pinned copy; the link then reads the copy.
STAGED_COPIES, DIRECT_COPIES = 3, 1
# Relative to matrix products: FlashAttention-2 reaches 50 to 73 % of the peak of an A100, matrix
# products 80 to 90 % (Dao, 2023, section 1).
DEVICE_ATTENTION_EFFICIENCY = 0.7
# Of kernels of states, by our estimate: share of the device's bandwidth in a step, and share of the
# rate of 16-bit products in prompts, as their sums are float32 without tensor cores.
DEVICE_STATE_EFFICIENCY, DEVICE_STATE_FLOP_SHARE = 0.8, 1 / 16
# Our estimates: a handful of kernel launches of 5 to 10 microseconds, interpreter time of a task
# outside its kernels, and the set-up of one copy.
OVERHEAD_S: Mapping[Resource, float] = {
    Resource.GPU: 30e-6,
    Resource.CPU: 50e-6,
    Resource.HTOD: 10e-6,
    Resource.DTOH: 10e-6,
    Resource.HOST_COPY: 10e-6,
}
SUM_BYTES = 4  # sums of expert outputs are float32
ROUTING_BYTES = 8  # number and weight of an expert of a token
PEER_STEP_S = 10e-6  # our estimate, of NCCL over PCIe


@dataclass(frozen=True)
class Rates:
    """Seconds of pieces of work on the cores, on the GPU and on the link of a node.

    Attributes:
        is_16_bit: Whether activations have 16 bits, as in the measurements.
        page_bytes: Mean bytes of weights per layer that cross the link.
        read_bytes: Mean bytes of KV and experts per layer that the CPU reads.
        is_staged: Whether pages go through a pinned staging ring.
        has_host_experts: Whether the CPU computes experts while pages cross the link.
    """

    hardware: HardwareSpec
    is_16_bit: bool
    page_bytes: float = 0.0
    read_bytes: float = 0.0
    is_staged: bool = False
    has_host_experts: bool = False

    @cached_property
    def host_bytes_per_s(self) -> float:
        """Host bandwidth left by the link and its staging (MoE-Lens, section 5.3, equation 5)."""
        whole = self.hardware.host_bytes_per_s
        if not self.page_bytes:
            return whole
        copies = STAGED_COPIES if self.is_staged else DIRECT_COPIES
        left = max(whole / 2, whole - copies * self.hardware.htod_bytes_per_s)
        if not self.has_host_experts:
            return left
        # If the CPU reads longer than the link copies, both together read at the whole bandwidth.
        together = self.read_bytes + copies * self.page_bytes
        return max(left, whole * self.read_bytes / together)

    @cached_property
    def htod_bytes_per_s(self) -> float:
        """Mean rate of the link, slower while the CPU reads KV (MoE-Lens, section 13)."""
        free = self.hardware.htod_bytes_per_s
        if not self.page_bytes:
            return free
        busy_share = BUSY_LINK_SHARE
        if self._device_curves is not None:
            busy_share = min(1.0, self._device_curves.busy_htod_bytes_per_s / free)
        reading_s = self.read_bytes / (CPU_ATTENTION_EFFICIENCY * self.host_bytes_per_s)
        slowdown = 1 + (1 - busy_share) * reading_s * free / self.page_bytes
        return free / min(slowdown, 1 / busy_share)

    def task_s(self, resource: Resource, tokens: float) -> float:
        """Seconds of a task beyond its kernels or copies, in a step of so many tokens."""
        if resource is Resource.CPU:
            return self._host_task_s(tokens)
        if resource is Resource.GPU:
            curves = self._device_curves
            if curves is not None and curves.tasks_per_s is not None:
                return 1 / curves.tasks_per_s
        return OVERHEAD_S[resource]

    def copy_s(self, resource: Resource, num_bytes: float) -> float:
        is_htod = resource is Resource.HTOD
        return num_bytes / (self.htod_bytes_per_s if is_htod else self.hardware.dtoh_bytes_per_s)

    def roof_s(self, resource: Resource, flop: float, num_bytes: float) -> float:
        """Longer of operations and bytes at a resource's rates (MoE-Lightning, 3.2, equation 8)."""
        if resource is Resource.GPU:
            hardware = self.hardware
            return max(flop / hardware.gpu_flop_per_s, num_bytes / hardware.gpu_bytes_per_s)
        return max(flop / self.hardware.host_flop_per_s, num_bytes / self.host_bytes_per_s)

    def moved_s(self, resource: Resource, num_bytes: float) -> float:
        """Seconds to read or write so many bytes of activations and KV, without operations."""
        if resource is Resource.GPU or self._host_curves is None:
            return self.roof_s(resource, 0.0, num_bytes)
        return num_bytes / self._host_curves.activation_bytes_per_s

    def between_s(self, resource: Resource, num_bytes: float) -> float:
        """Seconds of norms, rotations and sums beside products, where they were measured."""
        if resource is Resource.GPU or self._host_curves is None:
            return 0.0
        return self.moved_s(resource, num_bytes)

    def product_s(self, resource: Resource, rows: float, weights: Matrices) -> float:
        """Seconds of a projection whose weights are read from memory once."""
        if not rows:
            return 0.0
        if resource is Resource.GPU:
            curves = self._device_curves
            is_plain = weights.num_bytes >= 2 * weights.parameters
            measured = curves.product_flop_per_s if curves and is_plain else None
            return self._gpu_product_s(rows, weights, measured)
        host_curves = self._host_curves
        if host_curves is not None:
            return 2 * rows * weights.parameters / host_curves.product_flop_per_s.at(rows)
        efficiency = rows / (rows + HOST_HALF_EFFICIENCY_ROWS)
        return self.roof_s(resource, 2 * rows * weights.parameters / efficiency, weights.num_bytes)

    def experts_s(
        self, resource: Resource, rows: float, activated: float, expert: Matrices
    ) -> float:
        """Seconds of `activated` experts with `rows` tokens each."""
        if not rows:
            return 0.0
        if resource is Resource.GPU:
            return activated * self._gpu_experts_s(rows, expert)
        flop = 2 * rows * activated * expert.parameters
        # Where nothing streams, cores have quantised experts packed, and decode them while they
        # multiply: at most at the rate of 16 bits.
        is_packed = not self.page_bytes and not self.has_host_experts
        read = max(expert.num_bytes, 2 * expert.parameters) if is_packed else expert.num_bytes
        read_s = activated * read / self.host_bytes_per_s
        curves = self._host_curves
        if curves is not None:
            seconds = flop / curves.expert_flop_per_s.at(rows)
            if not is_packed:  # measured with all of the bandwidth
                seconds = max(seconds, read_s)
        else:
            efficiency = rows / (rows + HOST_HALF_EFFICIENCY_ROWS)
            seconds = max(flop / efficiency / self.hardware.host_flop_per_s, read_s)
        if not is_packed and expert.num_bytes < 2 * expert.parameters:  # decoded first
            decoded_per_s = self.hardware.num_cores * DECODED_ELEMENTS_PER_CORE_S
            seconds += activated * expert.parameters / decoded_per_s
        return seconds

    def network_s(self, resource: Resource, rows: float, weights: Matrices) -> float:
        """Seconds of the network that all tokens visit, which cores compute like an expert."""
        if resource is Resource.GPU:
            return self.product_s(resource, rows, weights)
        return self.experts_s(resource, rows, 1.0, weights)

    def attention_s(self, resource: Resource, share: AttentionShape, work: AttentionWork) -> float:
        """Seconds to append KV and attend, or to update states, on the cores or on a GPU.

        Appended rows are read and written once; context KV is read once for all heads of a group.
        Source: MoE-Lightning, section 4.2, equations 13 and 14, counting both products (queries by
        keys, scores by values) where its code counts one.
        """
        if work.is_scan:
            return self.states_s(resource, share, work)
        if work.choice is not None:
            attended = share.within(work.choice.num_chosen)
            if attended != share:
                chosen_s = self._attention_s(resource, attended, work.when_choosing)
                return chosen_s + self.selection_s(resource, share, work, work.choice)
        return self._attention_s(resource, share.within(work.window), work)

    def selection_s(
        self, resource: Resource, share: AttentionShape, work: AttentionWork, choice: Choice
    ) -> float:
        """Seconds to score contexts beyond what is attended to, and to gather what is chosen.

        Index keys of the attended tokens are read with these. Cores copy the chosen rows.
        """
        attended = share.within(choice.num_chosen)
        flop = choice.pair_flop * (share.pairs + share.prompt_pairs) / INDEX_FLOP_SHARE
        unread = share.context_tokens - attended.context_tokens
        num_bytes = choice.token_bytes * unread
        if resource is not Resource.GPU:
            copied = attended.prompt_pairs + choice.copies * attended.pairs
            num_bytes += 2 * work.kv_token_bytes * copied
        return self.roof_s(resource, flop, num_bytes)

    def _attention_s(self, resource: Resource, share: AttentionShape, work: AttentionWork) -> float:
        amounts = work.of(share)
        if resource is Resource.GPU:
            return self.gpu_attention_s(share, amounts.read_bytes + amounts.appended_bytes, work)
        curves = self._host_curves
        if curves is None or not share.rows:
            moved = amounts.read_bytes / CPU_ATTENTION_EFFICIENCY + amounts.appended_bytes
            return self.roof_s(resource, amounts.flop, moved)
        left, seconds = self.host_bytes_per_s / self.hardware.host_bytes_per_s, 0.0
        if share.decode_rows:
            rate = left * curves.attention_bytes_per_s.at(share.pairs / share.decode_rows)
            read = work.of(share.of_decoding).read_bytes
            seconds += max(read / rate, amounts.decode_flop / curves.attention_flop_per_s)
        if share.prompt_pairs:
            # A whole prompt has half as many pairs per token as it has tokens.
            prompt = 2 * share.prompt_pairs / (share.rows - share.decode_rows)
            rate = curves.prefill_flop_per_s.at(prompt)
            seconds += amounts.prompt_flop / rate
        return seconds

    def gpu_attention_s(
        self, share: AttentionShape, num_bytes: float, work: AttentionWork
    ) -> float:
        """Seconds to attend on a GPU to KV that is there, with the bytes read and written."""
        flop = work.of(share).flop
        curves = self._device_curves
        if curves is not None and share.prompt_pairs and curves.prefill_flop_per_s is not None:
            chunk = 2 * share.prompt_pairs / share.rows
            return max(
                flop / curves.prefill_flop_per_s.at(chunk),
                num_bytes / self.hardware.gpu_bytes_per_s,
            )
        flop_s = flop / (DEVICE_ATTENTION_EFFICIENCY * self.hardware.gpu_flop_per_s)
        rate = self.hardware.gpu_bytes_per_s
        if curves is not None and share.rows and curves.attention_bytes_per_s is not None:
            rate = curves.attention_bytes_per_s.at(share.context_tokens / share.rows)
        return max(flop_s, num_bytes / rate)

    def states_s(self, resource: Resource, share: AttentionShape, work: AttentionWork) -> float:
        """Seconds to read and write a state for each decoding row, and to scan all tokens.

        A prompt's state stays in a core's cache, or in registers of the GPU.
        """
        if resource is Resource.GPU:
            curves, hardware = self._device_curves, self.hardware
            bytes_per_s = DEVICE_STATE_EFFICIENCY * hardware.gpu_bytes_per_s
            if curves is not None and curves.state_bytes_per_s is not None:
                bytes_per_s = curves.state_bytes_per_s
            flop_per_s = DEVICE_STATE_FLOP_SHARE * hardware.gpu_flop_per_s
        else:
            bytes_per_s = STATE_BYTES_EFFICIENCY * self.host_bytes_per_s
            flop_per_s = STATE_FLOP_EFFICIENCY * self.hardware.host_flop_per_s
        bytes_s = 2 * share.decode_rows * work.state_bytes / bytes_per_s
        return max(bytes_s, share.rows * work.token_flop / flop_per_s)

    def _gpu_experts_s(self, rows: float, expert: Matrices) -> float:
        """Seconds of one expert: by the curve of its number of bits, or else its share."""
        bits = 8 * expert.num_bytes // max(1, expert.parameters)  # and scales beyond it
        curves, measured, share = self._device_curves, None, 1.0
        if bits >= 16:
            measured = None if curves is None else curves.expert_flop_per_s
        elif bits >= 8:
            measured = None if curves is None else curves.expert_flop_per_s_of_8_bits
            share = self.hardware.expert_share_of_8_bits
        else:
            measured = None if curves is None else curves.expert_flop_per_s_of_4_bits
            share = self.hardware.expert_share_of_4_bits
        return self._gpu_product_s(rows, expert, measured, share)

    def _gpu_product_s(
        self, rows: float, weights: Matrices, measured: Curve | None, share: float = 1.0
    ) -> float:
        if measured is not None:
            return 2 * rows * weights.parameters / measured.at(rows)
        flop = 2 * (rows + GPU_HALF_EFFICIENCY_ROWS) * weights.parameters / share
        return self.roof_s(Resource.GPU, flop, weights.num_bytes)

    def _host_task_s(self, tokens: float) -> float:
        overhead = (self._host_curves or self.hardware).task_overhead_s
        if overhead is None:
            return OVERHEAD_S[Resource.CPU]
        more_s = 0.0
        if len(overhead.points) > 1:  # rows of larger steps cost what the last measured ones did
            (before, seconds), (largest, last_s) = overhead.points[-2:]
            slope = max(0.0, last_s - seconds) / (largest - before)
            more_s = slope * max(0.0, tokens - largest)
        return overhead.at(tokens) + more_s

    @cached_property
    def _host_curves(self) -> HostCurves | None:
        return self.hardware.host_curves if self.is_16_bit else None

    @cached_property
    def _device_curves(self) -> DeviceCurves | None:
        return self.hardware.device_curves if self.is_16_bit else None


@dataclass(frozen=True)
class StepCost:
    """Cost model of one step on a node.

    Attributes:
        layers: What streams of each layer, and which experts cores compute; empty if nothing does.
        streamed_bytes: Mean bytes of weights per layer that cross the link; None for those of
            `layers`.
        micro_batches_per_group: Micro-batches that share one launch of the experts.
        is_staged: Whether pages go through a pinned staging ring.
    """

    work: ModelWork
    hardware: HardwareSpec
    micro_batches: tuple[MicroBatchShape, ...]
    layers: tuple[LayerPlacement, ...] = ()
    streamed_bytes: float | None = None
    micro_batches_per_group: int = 1
    is_staged: bool = False

    def __post_init__(self) -> None:
        needs_gpu = self.mean_bytes or any(each.device.rows for each in self.micro_batches)
        if needs_gpu and not self.hardware.has_gpu:
            raise ConfigError(f"StepCost: {self.hardware.name} has no GPU")
        if not self.micro_batches or self.micro_batches_per_group < 1:
            raise ConfigError(
                f"StepCost: {len(self.micro_batches)} micro-batches in groups of "
                f"{self.micro_batches_per_group}; "
                "both must be at least 1"
            )

    @classmethod
    def of_schedule(
        cls,
        schedule: Schedule,
        work: ModelWork,
        hardware: HardwareSpec,
        *,
        micro_batches: tuple[MicroBatchShape, ...],
        layers: tuple[LayerPlacement, ...],
    ) -> Self:
        """The costs of a schedule's tasks with these layers."""
        groups = [len(task.writes) for task in schedule.tasks if task.op is Op.EXPERTS]
        return cls(
            work,
            hardware,
            micro_batches=micro_batches,
            layers=layers,
            micro_batches_per_group=max(groups, default=1),
            is_staged=any(task.op is Op.STAGE for task in schedule.tasks),
        )

    def duration_s(self, task: Task) -> float:
        if task.op is Op.SYNC:
            return 0.0
        return self.rates.task_s(task.resource, self.tokens) + self.kernel_s(task)

    def kernel_s(self, task: Task) -> float:
        """Seconds of a task's kernels or copies alone."""
        return _SECONDS[task.op](self, task)

    @cached_property
    def tokens(self) -> float:
        return sum(micro_batch.tokens for micro_batch in self.micro_batches)

    def micro_batch(self, task: Task) -> MicroBatchShape:
        return self.micro_batches[task.part]

    def layer(self, task: Task) -> LayerWork:
        return self.work.layers[task.layer]

    def num_groups(self, task: Task) -> int:
        """Groups of experts of a layer, one more where cores compute some."""
        if not self.layers:
            return 1
        layer = self.layers[task.layer]
        return max(1, len(layer.group_shares) + bool(layer.host_experts))

    def host_share(self, layer: int) -> float:
        """The share of a layer's experts that cores compute beside the device."""
        return self.layers[layer].host_share if self.layers else 0.0

    @cached_property
    def mean_bytes(self) -> float:
        """Mean bytes of weights per layer that cross the link."""
        if self.streamed_bytes is not None:
            return self.streamed_bytes
        return sum(sum(layer.page_bytes) for layer in self.layers) / max(1, len(self.layers))

    @cached_property
    def has_host_experts(self) -> bool:
        return any(layer.host_experts for layer in self.layers)

    def launch_tokens(self, launch: int) -> float:
        start = launch * self.micro_batches_per_group
        return sum(
            micro_batch.tokens
            for micro_batch in self.micro_batches[start : start + self.micro_batches_per_group]
        )

    @cached_property
    def rates(self) -> Rates:
        num_layers = len(self.work.layers)
        micro_batches = Counter(micro_batch.host for micro_batch in self.micro_batches)
        layers = Counter(
            (layer.attention.window, layer.attention.kv_token_bytes, layer.attention.recent)
            for layer in self.work.layers
        )
        read_bytes = 0.0
        for (window, kv_token_bytes, recent), number in layers.items():
            for host, count in micro_batches.items():
                of_layer = host.within(window).context_tokens * kv_token_bytes
                if recent is not None:
                    of_layer += host.within(recent.window).context_tokens * recent.row_bytes
                read_bytes += count * number * of_layer
        if not any(layer.states_on_device for layer in self.layers):
            decode_rows = sum(count * host.decode_rows for host, count in micro_batches.items())
            read_bytes += 2 * self.work.updated_bytes * decode_rows
        if self.has_host_experts:
            num_launches = ceil_div(len(self.micro_batches), self.micro_batches_per_group)
            tokens = [self.launch_tokens(launch) for launch in range(num_launches)]
            read_bytes += sum(
                placed.host_share * layer.activated_experts(count) * layer.expert.num_bytes
                for layer, placed in zip(self.work.layers, self.layers, strict=True)
                for count in tokens
            )
        return Rates(
            self.hardware,
            is_16_bit=self.work.bytes_per_element == 2,
            page_bytes=self.mean_bytes,
            read_bytes=read_bytes / num_layers,
            is_staged=self.is_staged,
            has_host_experts=self.has_host_experts,
        )

    def pages_s(self, num_bytes: float, number: int) -> float:
        """Seconds of the link for so many pages."""
        return number * OVERHEAD_S[Resource.HTOD] + self.rates.copy_s(Resource.HTOD, num_bytes)

    def all_reduce_s(self, tokens: float) -> float:
        """All-reduce of hidden states over the ranks, in 2 (n - 1) steps.

        Each rank sends and receives 2 (n - 1) / n of the bytes. Source: Patarasuk and Yuan,
        Bandwidth optimal all-reduce algorithms for clusters of workstations (2009), section 4.
        """
        ranks, hardware = self.work.num_ranks, self.hardware
        if ranks == 1 or not tokens or not hardware.has_gpu:
            return 0.0
        slower = min(hardware.htod_bytes_per_s, hardware.dtoh_bytes_per_s)
        steps = 2 * (ranks - 1)
        num_bytes = tokens * self.row_bytes(self.work.hidden_size)
        return steps * (PEER_STEP_S + num_bytes / ranks / (hardware.peer_bytes_per_s or slower))

    def mixing_s(self, task: Task, tokens: float, *, factors: int, visits: int) -> float:
        """Seconds to read inputs of blocks from several streams, and to add results to them.

        Args:
            factors: How often factors are computed.
            visits: How often all streams are read or written: once for factors and for an
                input, twice to add.
        """
        mixers = self.layer(task).mixers
        if not mixers.parameters:
            return 0.0
        num_bytes = self.work.mixing_bytes(tokens, visits)
        product_s = self.rates.product_s(task.resource, tokens, mixers.share(1, 2))
        return factors * product_s + self.rates.moved_s(task.resource, num_bytes)

    def row_bytes(self, width: int) -> int:
        return self.work.row_bytes(width)

    def experts_s(self, task: Task, tokens: float, share: float) -> float:
        """Seconds of a share of the experts that so many tokens activate."""
        layer = self.layer(task)
        activated = layer.activated_experts(tokens)
        if not activated:
            return 0.0
        rows = tokens * layer.top_k / activated
        return self.rates.experts_s(task.resource, rows, share * activated, layer.expert)


def _embed_s(cost: StepCost, task: Task) -> float:
    tokens = cost.micro_batch(task).tokens
    return cost.rates.moved_s(task.resource, cost.work.embedding_bytes(tokens))


def _up_s(cost: StepCost, task: Task) -> float:
    width = cost.work.residual_size + cost.work.ngram_width
    num_bytes = cost.micro_batch(task).tokens * cost.row_bytes(width)
    return cost.rates.copy_s(task.resource, num_bytes)


def _pre_s(cost: StepCost, task: Task) -> float:
    """Q, K, V projections: GA of MoE-Lens, section 6.4; MoE-Lightning, section 4.2, omits them."""
    tokens, layer = cost.micro_batch(task).tokens, cost.layer(task)
    seconds = cost.rates.product_s(task.resource, tokens, layer.pre) + cost.rates.between_s(
        task.resource, cost.work.before_attention_bytes(layer, tokens)
    )
    return seconds + cost.mixing_s(task, tokens, factors=1, visits=STREAM_VISITS[0])


def _qkv_s(cost: StepCost, task: Task) -> float:
    micro_batch, work = cost.micro_batch(task), cost.layer(task).attention
    queries = micro_batch.host.rows * cost.row_bytes(work.query_width)
    return cost.rates.copy_s(task.resource, queries + micro_batch.tokens * work.kv_token_bytes)


def _attention_s(cost: StepCost, task: Task) -> float:
    """Append to the cache and attend: the host's rows, or all on a GPU that holds the cache."""
    micro_batch = cost.micro_batch(task)
    is_on_gpu = task.resource is Resource.GPU
    share = micro_batch.host + micro_batch.device if is_on_gpu else micro_batch.host
    return cost.rates.attention_s(task.resource, share, cost.layer(task).attention)


def _kv_s(cost: StepCost, task: Task) -> float:
    work = cost.layer(task).attention
    share = cost.micro_batch(task).device.within(work.window)
    num_bytes = share.past_tokens * work.kv_token_bytes
    if work.recent is not None:
        num_bytes += share.decode_rows * work.state_bytes
    return cost.rates.copy_s(task.resource, num_bytes)


def _device_attention_s(cost: StepCost, task: Task) -> float:
    work, micro_batch = cost.layer(task).attention, cost.micro_batch(task)
    if work.is_scan:
        both = micro_batch.host + micro_batch.device
        return cost.rates.states_s(task.resource, both, work)
    share, rates, choice = micro_batch.device.within(work.window), cost.rates, work.choice
    attended = share if choice is None else share.within(choice.num_chosen)
    amounts = work.of(attended)
    num_bytes = amounts.read_bytes + (0.0 if work.recent is None else amounts.appended_bytes)
    if choice is None or attended == share:
        return rates.gpu_attention_s(share, num_bytes, work)
    chosen_s = rates.gpu_attention_s(attended, num_bytes, work.when_choosing)
    return chosen_s + rates.selection_s(task.resource, share, work, choice)


def _append_s(cost: StepCost, task: Task) -> float:
    amounts = cost.layer(task).attention.of(cost.micro_batch(task).device)
    return cost.rates.moved_s(task.resource, amounts.appended_bytes)


def _hidden_s(cost: StepCost, task: Task) -> float:
    num_bytes = cost.micro_batch(task).host.rows * cost.row_bytes(
        cost.layer(task).attention.output_width
    )
    return cost.rates.copy_s(task.resource, num_bytes)


def _post_s(cost: StepCost, task: Task) -> float:
    layer, tokens = cost.layer(task), cost.micro_batch(task).tokens
    seconds = cost.rates.product_s(task.resource, tokens, layer.post.plus(layer.router))
    between = cost.work.after_attention_bytes(tokens)
    seconds += cost.rates.between_s(task.resource, between) + cost.all_reduce_s(tokens)
    # A gate of recurrent states reads the input of attention.
    again = int(layer.attention.is_scan)
    return seconds + cost.mixing_s(task, tokens, factors=2, visits=STREAM_VISITS[1] + again)


def _experts_s(cost: StepCost, task: Task) -> float:
    """Activated experts, read once per launch, and the network that all tokens visit.

    A launch of one group of experts computes its share of them, and reads and writes the sums of
    all tokens, in float32; that of the last group computes the network that all tokens visit. Where
    cores compute experts beside the device, the last group only adds their sums.
    Source: MoE-Lightning, section 4.2, equation 14 (T_ffn). Its code reads all experts for each
    micro-batch; this reads the expected number of distinct ones.
    """
    layer, num_groups, rates = cost.layer(task), cost.num_groups(task), cost.rates
    launch, group = divmod(task.part, num_groups)
    tokens, share, seconds = cost.launch_tokens(launch), 1.0, 0.0
    if not tokens:
        return 0.0
    if num_groups > 1 or cost.host_share(task.layer):
        shares = cost.layers[task.layer].group_shares
        share = shares[group] if group < len(shares) else 0.0
        sums = tokens * layer.expert_input * SUM_BYTES
        seconds = rates.roof_s(task.resource, 0.0, 2 * sums)
    if group + 1 == num_groups:
        between = cost.work.after_ffn_bytes(tokens)
        seconds += rates.network_s(task.resource, tokens, layer.common)
        seconds += rates.between_s(task.resource, between) + cost.all_reduce_s(tokens)
        seconds += cost.mixing_s(task, tokens, factors=0, visits=STREAM_VISITS[2])
    return seconds + cost.experts_s(task, tokens, share)


def _rows_s(cost: StepCost, task: Task) -> float:
    layer = cost.layer(task)
    row_bytes = cost.row_bytes(layer.expert_input) + layer.top_k * ROUTING_BYTES
    num_bytes = cost.launch_tokens(task.part) * row_bytes
    return cost.rates.copy_s(task.resource, num_bytes)


def _host_experts_s(cost: StepCost, task: Task) -> float:
    return cost.experts_s(task, cost.launch_tokens(task.part), cost.host_share(task.layer))


def _sums_s(cost: StepCost, task: Task) -> float:
    num_bytes = cost.launch_tokens(task.part) * cost.layer(task).expert_input * SUM_BYTES
    return cost.rates.copy_s(task.resource, num_bytes)


def _head_s(cost: StepCost, task: Task) -> float:
    rows = sum(micro_batch.logit_rows for micro_batch in cost.micro_batches)
    return cost.rates.product_s(task.resource, rows, cost.work.head) + cost.rates.between_s(
        task.resource, cost.work.logit_bytes(rows)
    )


def _page_s(cost: StepCost, task: Task) -> float:
    return cost.rates.copy_s(task.resource, cost.layers[task.layer].page_bytes[task.part])


def _stage_s(cost: StepCost, task: Task) -> float:
    return cost.layers[task.layer].page_bytes[task.part] / cost.hardware.host_copy_bytes_per_s


_SECONDS: Mapping[Op, Callable[[StepCost, Task], float]] = {
    Op.EMBED: _embed_s,
    Op.UP: _up_s,
    Op.PRE: _pre_s,
    Op.QKV: _qkv_s,
    Op.ATTN: _attention_s,
    Op.KV: _kv_s,
    Op.GATTN: _device_attention_s,
    Op.APPEND: _append_s,
    Op.HID: _hidden_s,
    Op.POST: _post_s,
    Op.ROWS: _rows_s,
    Op.CEXPERTS: _host_experts_s,
    Op.SUMS: _sums_s,
    Op.EXPERTS: _experts_s,
    Op.HEAD: _head_s,
    Op.W: _page_s,
    Op.STAGE: _stage_s,
}
