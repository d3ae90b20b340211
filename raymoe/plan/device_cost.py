"""Seconds of each task of a pass whose weights stream to a GPU: the longest of its roofs.

Assumptions:
- A task on level i takes the longer of its operations over the rate of that level and its bytes
  over the bandwidth of that level; a copy takes its bytes over the link (MoE-Lightning, section
  3.2, equations 7 and 8; section 4.2, equations 12 to 14). Copies of the two directions do
  not disturb each other (section 4.1).
- The expected number of distinct experts is read, choices independent. Activations in device
  memory are left out: where they are large, operations bind.
- Attention of a layer with a sliding window reads no more of a context than the window.
- The rates are those of `device_rates`, measured or not.
- Ranks add up their parts in a ring, on the GPU's time; that weights come over the same links
  meanwhile is left out, and so are the squares of norms over all heads, two numbers for a token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from raymoe.errors import ConfigError
from raymoe.plan.device_rates import DeviceRates
from raymoe.plan.wave import AttentionShape, WaveShape
from raymoe.plan.work import LayerWork, ModelWork
from raymoe.schedule.graph import Schedule
from raymoe.schedule.task import Op, Resource, Task
from raymoe.specs.hardware import HardwareSpec

# Of the rate of matrix products: FlashAttention-2 reaches 50 to 73 % of the peak of an A100, matrix
# products 80 to 90 % (Dao, 2023, section 1).
DEVICE_ATTENTION_EFFICIENCY = 0.7
# Our estimates: a handful of kernel launches of 5 to 10 microseconds, one copy's set-up, and the
# interpreter's time as in `cost`.
OVERHEAD_S: Mapping[Resource, float] = {
    Resource.GPU: 30e-6,
    Resource.CPU: 50e-6,
    Resource.HTOD: 10e-6,
    Resource.DTOH: 10e-6,
    Resource.HOST_COPY: 10e-6,
}
PEER_STEP_S = 10e-6  # our estimate, of NCCL over PCIe


@dataclass(frozen=True)
class DeviceCost:
    """Cost model of one pass on a node with a GPU.

    Attributes:
        work: The model in numbers; hidden states have its `bytes_per_element`.
        waves: Shape of each wave of the pass.
        page_bytes: Of each layer, the bytes of each page of weights (`PageCut.page_bytes`); empty
            where nothing streams.
        waves_per_group: Waves whose tokens meet in one launch of the experts.
        is_staged: Whether pages go through a pinned staging ring.

    Raises:
        ConfigError: The node has no GPU, or the shape of the pass makes no sense.
    """

    work: ModelWork
    hardware: HardwareSpec
    waves: tuple[WaveShape, ...]
    page_bytes: tuple[tuple[int, ...], ...] = ()
    waves_per_group: int = 1
    is_staged: bool = False

    def __post_init__(self) -> None:
        if not self.hardware.has_gpu:
            raise ConfigError(f"DeviceCost: {self.hardware.name} has no GPU")
        if not self.waves or self.waves_per_group < 1:
            raise ConfigError(
                f"DeviceCost: {len(self.waves)} waves in groups of {self.waves_per_group}; "
                "both must be at least 1"
            )

    @classmethod
    def of_schedule(
        cls,
        schedule: Schedule,
        work: ModelWork,
        hardware: HardwareSpec,
        *,
        waves: tuple[WaveShape, ...],
        page_bytes: tuple[tuple[int, ...], ...],
    ) -> Self:
        """The costs of one pass by a schedule, which says how waves meet and pages travel."""
        groups = [len(task.writes) for task in schedule.tasks if task.op is Op.EXPERTS]
        return cls(
            work,
            hardware,
            waves=waves,
            page_bytes=page_bytes,
            waves_per_group=max(groups, default=1),
            is_staged=any(task.op is Op.STAGE for task in schedule.tasks),
        )

    def duration_s(self, task: Task) -> float:
        """See `CostModel`."""
        if task.op is Op.SYNC:
            return 0.0
        return OVERHEAD_S[task.resource] + _SECONDS[task.op](self, task)

    def wave(self, task: Task) -> WaveShape:
        """The wave of a task of one wave."""
        return self.waves[task.part]

    def layer(self, task: Task) -> LayerWork:
        """The layer of a task."""
        return self.work.layers[task.layer]

    def group_tokens(self, group: int) -> float:
        """Tokens that meet in one launch of the experts."""
        start = group * self.waves_per_group
        return sum(wave.tokens for wave in self.waves[start : start + self.waves_per_group])

    @cached_property
    def rates(self) -> DeviceRates:
        """What host, GPU and link reach during the pass."""
        num_layers = len(self.work.layers)
        read_bytes = sum(
            wave.host.within(layer.window).context_tokens * layer.kv_token_bytes
            for layer in self.work.layers
            for wave in self.waves
        )
        return DeviceRates(
            self.hardware,
            is_16_bit=self.work.bytes_per_element == 2,
            page_bytes=sum(map(sum, self.page_bytes)) / max(1, len(self.page_bytes)),
            read_bytes=read_bytes / num_layers,
            is_staged=self.is_staged,
        )

    @property
    def pages_s(self) -> float:
        """All pages of a pass over the link."""
        num_bytes, number = sum(map(sum, self.page_bytes)), sum(map(len, self.page_bytes))
        return number * OVERHEAD_S[Resource.HTOD] + self.rates.copy_s(Resource.HTOD, num_bytes)

    def all_reduce_s(self, tokens: float) -> float:
        """Hidden states of so many tokens, added up over the ranks.

        Each sends and receives 2 (n - 1) / n of them in 2 (n - 1) steps.

        Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
        workstations (2009), section 4.
        """
        ranks, hardware = self.work.num_ranks, self.hardware
        if ranks == 1 or not tokens:
            return 0.0
        slower = min(hardware.htod_bytes_per_s, hardware.dtoh_bytes_per_s)
        steps = 2 * (ranks - 1)
        num_bytes = tokens * self.row_bytes(self.work.hidden_size)
        return steps * (PEER_STEP_S + num_bytes / ranks / (hardware.peer_bytes_per_s or slower))

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of activations."""
        return self.work.bytes_per_element * width


def _embed_s(cost: DeviceCost, task: Task) -> float:
    """Each row is read from the table and written: HRM equation 8, no operations."""
    num_bytes = 2 * cost.wave(task).tokens * cost.row_bytes(cost.work.hidden_size)
    return cost.rates.roof_s(task.resource, 0.0, num_bytes)


def _up_s(cost: DeviceCost, task: Task) -> float:
    """Hidden states of all tokens: D2 of MoE-Lightning, section 4.1."""
    num_bytes = cost.wave(task).tokens * cost.row_bytes(cost.work.hidden_size)
    return cost.rates.copy_s(task.resource, num_bytes)


def _pre_s(cost: DeviceCost, task: Task) -> float:
    """Q, K, V projections: GA of MoE-Lens, section 6.4.

    MoE-Lightning leaves the projections out (section 4.2).
    """
    wave, layer = cost.wave(task), cost.layer(task)
    return cost.rates.projection_s(wave.tokens, layer.pre)


def _qkv_s(cost: DeviceCost, task: Task) -> float:
    """Queries of the CPU's share, all keys and values: D1 of MoE-Lightning, section 4.1."""
    wave, layer = cost.wave(task), cost.layer(task)
    queries = wave.host.rows * cost.row_bytes(layer.query_width)
    return cost.rates.copy_s(task.resource, queries + wave.tokens * layer.kv_token_bytes)


def _attention_s(cost: DeviceCost, task: Task) -> float:
    """Append to the cache, then attention: of the CPU's share, or of all on a GPU with the cache.

    The appended rows are read and written once; the KV of the context is read once for all heads
    of a group. Source: MoE-Lightning, section 4.2, equations 13 and 14, with the operations of
    both products (queries by keys, scores by values), where its code counts one.
    """
    wave, layer = cost.wave(task), cost.layer(task)
    if task.resource is Resource.GPU:
        share = (wave.host + wave.device).within(layer.window)
        num_bytes = (share.context_tokens + 2 * share.rows) * layer.kv_token_bytes
        flop = _attention_flop(share, layer) / DEVICE_ATTENTION_EFFICIENCY
        return cost.rates.roof_s(task.resource, flop, num_bytes)
    share = wave.host.within(layer.window)
    return cost.rates.host_attention_s(share, layer.kv_token_bytes, _attention_flop(share, layer))


def _attention_flop(share: AttentionShape, layer: LayerWork) -> float:
    return layer.pair_flop * share.pairs + layer.prefill_pair_flop * share.prompt_pairs


def _kv_s(cost: DeviceCost, task: Task) -> float:
    """Earlier KV of the device's share: D4 of MoE-Lightning, section 4.1."""
    layer = cost.layer(task)
    share = cost.wave(task).device.within(layer.window)
    return cost.rates.copy_s(task.resource, share.past_tokens * layer.kv_token_bytes)


def _device_attention_s(cost: DeviceCost, task: Task) -> float:
    """Attention of the device's share: MoE-Lightning, section 4.2, equations 13 and 14."""
    layer = cost.layer(task)
    share = cost.wave(task).device.within(layer.window)
    flop = _attention_flop(share, layer) / DEVICE_ATTENTION_EFFICIENCY
    return cost.rates.roof_s(task.resource, flop, layer.kv_token_bytes * share.context_tokens)


def _append_s(cost: DeviceCost, task: Task) -> float:
    """Keys and values of the device's share, read and written once on the host."""
    num_bytes = 2 * cost.wave(task).device.rows * cost.layer(task).kv_token_bytes
    return cost.rates.roof_s(task.resource, 0.0, num_bytes)


def _hidden_s(cost: DeviceCost, task: Task) -> float:
    """Attention output of the CPU's share: D2 of MoE-Lightning, section 4.1."""
    num_bytes = cost.wave(task).host.rows * cost.row_bytes(cost.layer(task).output_width)
    return cost.rates.copy_s(task.resource, num_bytes)


def _post_s(cost: DeviceCost, task: Task) -> float:
    """Output projection and router: GB of MoE-Lens, section 6.4, without the experts."""
    layer, tokens = cost.layer(task), cost.wave(task).tokens
    seconds = cost.rates.projection_s(tokens, layer.post.plus(layer.router))
    return seconds + cost.all_reduce_s(tokens)


def _experts_s(cost: DeviceCost, task: Task) -> float:
    """Experts that were chosen, read once a group, and the network that all tokens visit.

    Source: MoE-Lightning, section 4.2, equation 14 (T_ffn); its code reads all experts for each
    micro-batch, here it is the expected number of distinct ones.
    """
    tokens, layer = cost.group_tokens(task.part), cost.layer(task)
    if not tokens:
        return 0.0
    seconds = cost.rates.projection_s(tokens, layer.common) + cost.all_reduce_s(tokens)
    touched = layer.touched_experts(tokens)
    if touched:
        rows_per_expert = tokens * layer.top_k / touched
        seconds += touched * cost.rates.expert_s(rows_per_expert, layer.expert)
    return seconds


def _head_s(cost: DeviceCost, task: Task) -> float:
    """Logits of all waves in one product."""
    del task
    return cost.rates.projection_s(sum(wave.logit_rows for wave in cost.waves), cost.work.head)


def _page_s(cost: DeviceCost, task: Task) -> float:
    """One page of weights to the device: D3 of MoE-Lightning, section 4.1."""
    return cost.rates.copy_s(task.resource, cost.page_bytes[task.layer][task.part])


def _stage_s(cost: DeviceCost, task: Task) -> float:
    """One page from pageable to pinned memory: W_CtoPin of MoE-Lightning, algorithm 1."""
    return cost.page_bytes[task.layer][task.part] / cost.hardware.host_copy_bytes_per_s


_SECONDS: Mapping[Op, Callable[[DeviceCost, Task], float]] = {
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
    Op.EXPERTS: _experts_s,
    Op.HEAD: _head_s,
    Op.W: _page_s,
    Op.STAGE: _stage_s,
}
