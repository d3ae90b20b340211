"""Points of a search, and the sizes that memory leaves them."""

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from math import ceil, log2
from typing import NoReturn, Self

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.footprint import (
    device_footprint,
    host_footprint,
    kv_block_bytes,
    window_block_bytes,
)
from raymoe.plan.placement import (
    WHOLE_MODEL_SCHEDULES,
    LayerBytes,
    Placement,
    layer_sizes,
    slots_bytes,
)
from raymoe.plan.policy import (
    FEWER_BITS,
    MIN_SNAPSHOTS,
    ON_THE_GPU_ALONE,
    PAGE_BYTES,
    SEQUENCES_PER_SNAPSHOT,
    SHORTER_ROWS,
    DevicePolicy,
    Footprint,
    Policy,
    blocks_of,
    host_advice,
    max_sequences,
    window_blocks,
)
from raymoe.plan.work import ModelWork
from raymoe.schedule.builders import CPU_ATTENTION_FRACTIONS, MAX_MICRO_BATCHES, RING_SCHEDULES
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div

WHOLE_LAYERS = 2.0
EXPERT_GROUPS = 8  # of a layer, in rings


@dataclass(frozen=True, kw_only=True)
class JobOnNode:
    """What a plan is for.

    Attributes:
        weight_bytes: All weights in the form that the cores' kernels read; None estimates.
    """

    model: ModelSpec
    work: ModelWork
    hardware: HardwareSpec
    workload: Workload
    max_model_len: int
    weight_bytes: int | None = None

    def host_footprint(self, placement: Placement) -> Footprint:
        weights = self._packed_bytes if placement.is_in_place else 0
        return host_footprint(self.model, self.work, placement, weights)

    def device_footprint(self, placement: Placement) -> Footprint:
        return device_footprint(self.model, self.work, placement)

    def check_fits(self, placement: Placement, *, what: str, on_host: str, on_device: str) -> None:
        """Raise InfeasiblePlanError if a memory is too small.

        Args:
            what: What needs the memory.
            on_host: What to do where only the KV cache is too much for the host.
            on_device: What to do where the device is too small.
        """
        hardware, needs = self.hardware, self.host_footprint(placement)
        advice = on_host
        if not placement.is_resident:
            advice = host_advice(needs, hardware.host_memory_bytes, on_host)
        needs.check_fits(hardware.host_memory_bytes, what=what, advice=advice)
        of_device = self.device_footprint(placement)
        of_device.check_fits(hardware.gpu_memory_bytes, what=what, advice=on_device)

    def num_blocks(self, num_bytes: int, point: "SearchPoint") -> int:
        """KV blocks for which there is room, with the states of the rows whose KV is in them.

        Of the states there are snapshots too. The longest row has room if it would be alone: it
        takes more blocks than come with the states of many others. The same holds for the windows
        of rows, where layers with a window have blocks of their own.
        """
        num_blocks = self._num_blocks(num_bytes, with_states=not point.states_on_device)
        if self.work.window is None:
            return num_blocks
        return max(num_blocks, self._num_blocks_beside_windows(num_bytes, point))

    def _num_blocks_beside_windows(self, num_bytes: int, point: "SearchPoint") -> int:
        num_bytes -= self._step_bytes(point)
        block_bytes = kv_block_bytes(self.work) - window_block_bytes(self.work)
        longest = min(self.min_blocks, (num_bytes - self._window_bytes) // block_bytes)
        num_bytes -= MIN_SNAPSHOTS * self._window_bytes
        of_row = self._window_bytes + ceil_div(self._window_bytes, SEQUENCES_PER_SNAPSHOT)
        of_all_rows = of_row * self.workload.num_rows
        of_block = ceil(point.batch_share * of_row * KV_BLOCK_TOKENS / self._mean_tokens)
        return max(
            longest,
            max(0, num_bytes) // (block_bytes + of_block),
            (num_bytes - of_all_rows) // block_bytes,
        )

    def max_windows(self, num_bytes: int, num_blocks: int, point: "SearchPoint") -> int:
        """Sequences whose windows have room next to so many blocks of other layers."""
        if num_blocks * kv_block_bytes(self.work) <= num_bytes:
            return self.workload.num_rows  # in blocks of their own they need no more
        num_bytes -= num_blocks * (kv_block_bytes(self.work) - window_block_bytes(self.work))
        return max_sequences(num_bytes - self._step_bytes(point), 0, self._window_bytes)

    @property
    def _window_bytes(self) -> int:
        assert self.work.window is not None
        return window_blocks(self.work.window) * window_block_bytes(self.work)

    def _step_bytes(self, point: "SearchPoint") -> int:
        """Of the tokens of a step, in layers with windows."""
        return blocks_of(point.max_num_batched_tokens) * window_block_bytes(self.work)

    def _num_blocks(self, num_bytes: int, *, with_states: bool) -> int:
        state_bytes, block_bytes = self.work.state_bytes, kv_block_bytes(self.work)
        if not state_bytes or not with_states:
            return num_bytes // block_bytes
        longest = min(self.min_blocks, (num_bytes - state_bytes) // block_bytes)
        num_bytes = max(0, num_bytes - MIN_SNAPSHOTS * state_bytes)
        of_row = state_bytes + ceil_div(state_bytes, SEQUENCES_PER_SNAPSHOT)
        states = ceil_div(of_row * KV_BLOCK_TOKENS, self._mean_tokens)
        return max(longest, num_bytes // (block_bytes + states))

    def max_states(self, num_bytes: int, num_blocks: int) -> int:
        """Sequences whose states have room next to so many KV blocks."""
        left = num_bytes - num_blocks * kv_block_bytes(self.work)
        return max_sequences(left, 0, self.work.state_bytes)

    @cached_property
    def _packed_bytes(self) -> int:
        return self.weight_bytes or self.model.weight_bytes(self.work.bytes_per_element)

    @cached_property
    def _mean_tokens(self) -> int:
        workload = self.workload
        held = workload.computed_prompt_tokens + workload.generated_tokens // 2
        return held + KV_BLOCK_TOKENS // 2

    def max_num_seqs(self, num_blocks: int, share: float) -> int:
        """At most `share` of those whose KV fits at mean length; 0 if the longest does not fit."""
        if num_blocks < self.min_blocks:
            return 0
        num_rows = self.workload.num_rows
        if self.work.state_bytes:
            share = min(share, 1.0)  # `num_blocks` left no room for more states
        live = max(1, num_blocks * KV_BLOCK_TOKENS // self._mean_tokens)
        return min(num_rows, ceil(share * min(num_rows, live)))

    @property
    def balanced_tokens(self) -> int:
        """Tokens per step at which the GPU takes as long as the link (n_real of MoE-Lens, 6.3)."""
        step_s = self.work.all_weight_bytes / self.hardware.htod_bytes_per_s
        return max(1, int(step_s * self.hardware.gpu_flop_per_s / self.work.token_flop))

    def useful_blocks(self, num_blocks: int, max_num_seqs: int) -> int:
        """Cap blocks at what `max_num_seqs` sequences could fill."""
        roomy = min(self.max_model_len, 2 * self.workload.context_tokens)
        return min(num_blocks, max(self.min_blocks, max_num_seqs * blocks_of(roomy)))

    @property
    def min_blocks(self) -> int:
        return blocks_of(self.max_model_len)


@dataclass(frozen=True, slots=True, order=True)
class SearchPoint:
    # Live sequences over those whose KV fits at mean length; above 1, admission limits them by its
    # forecast of the cache.
    batch_share: float
    num_micro_batches: int
    is_grouped: bool  # whether one expert launch covers all micro-batches of a step
    look_ahead: int  # micro-batches whose attention runs ahead of the experts
    cpu_attention_fraction: float  # share of the decoding sequences that attend on the CPU
    max_num_batched_tokens: int
    # Layers of streamed weights that the device holds at once: two whole ones, or a ring of groups
    # of experts.
    slot_layers: float = WHOLE_LAYERS
    steady_admission: bool = True
    # Share of the streamed experts that cores compute, in steps for which that is faster.
    cpu_experts_fraction: float = 0.0
    states_on_device: bool = False  # of models whose layers keep states


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Values of each axis, in the field order of `SearchPoint`."""

    batch_share: tuple[float, ...] = (2.0, 1.0, 0.5, 0.25, 0.125)
    num_micro_batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    is_grouped: tuple[bool, ...] = (False, True)
    look_ahead: tuple[int, ...] = (1, 2, 15)
    cpu_attention_fraction: tuple[float, ...] = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
    max_num_batched_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    slot_layers: tuple[float, ...] = (WHOLE_LAYERS, 1.0, 0.5, 0.25)
    steady_admission: tuple[bool, ...] = (True, False)
    cpu_experts_fraction: tuple[float, ...] = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
    states_on_device: tuple[bool, ...] = (False,)

    @classmethod
    def of(cls, job: JobOnNode, schedule: str = "micro_batches") -> Self:
        """The values that may make a job faster with a schedule.

        Where weights stream, tokens of a step by octaves up to the balance of GPU and link, or all
        that the job has. More make steps longer and rows wait, and nothing faster.
        """
        if schedule in WHOLE_MODEL_SCHEDULES:
            return cls._of_whole(schedule)
        workload = job.workload
        useful = workload.total_computed_prompt_tokens + workload.num_rows
        num_octaves = ceil(log2(max(1.0, min(useful, 4 * job.balanced_tokens) / MIN_TOKENS)))
        tokens = tuple(MIN_TOKENS << octave for octave in range(num_octaves + 1))
        can_move = job.model.has_states and not job.model.has_states_beside_kv
        return cls(
            max_num_batched_tokens=tokens,
            states_on_device=(False, True) if can_move else (False,),
        )

    @classmethod
    def _of_whole(cls, schedule: str) -> Self:
        space = cls(
            num_micro_batches=(1,),
            is_grouped=(False,),
            look_ahead=(0,),
            cpu_attention_fraction=(CPU_ATTENTION_FRACTIONS[schedule],),
            slot_layers=(WHOLE_LAYERS,),
            cpu_experts_fraction=(0.0,),
        )
        if schedule == "resident":
            return space
        shares = tuple(2.0**-power for power in range(11))
        return replace(space, batch_share=shares, max_num_batched_tokens=HOST_TOKENS)

    def around(self, search_point: SearchPoint, *names: str) -> Iterator[SearchPoint]:
        axes = [getattr(self, name) for name in names]
        for values in itertools.product(*axes):
            yield replace(search_point, **dict(zip(names, values, strict=True)))

    def points(self) -> Iterator[SearchPoint]:
        return itertools.starmap(SearchPoint, itertools.product(*astuple(self)))


# Tokens of a step of cores alone, in which products reach their best rate earlier than on a GPU.
HOST_TOKENS = (512, 1024, 2048, 4096, 8192)
AXES = tuple(axis.name for axis in fields(SearchPoint))
MIN_TOKENS = 1024


def finer(at: SearchPoint) -> Iterator[SearchPoint]:
    """Points between those of the grid: sizes by thirds of octaves, 5 % of the rows."""
    for power in (1, -1, 2, -2):
        factor = 2 ** (power / 3)
        yield replace(at, batch_share=factor * at.batch_share)
        yield replace(at, max_num_batched_tokens=round(factor * at.max_num_batched_tokens))
    for step in (1, -1):
        yield replace(at, num_micro_batches=max(1, at.num_micro_batches + step))
        yield replace(at, look_ahead=max(0, at.look_ahead + step))
    for more in (0.1, 0.05, -0.05, -0.1):
        fraction = min(1.0, max(0.0, round(at.cpu_attention_fraction + more, 2)))
        yield replace(at, cpu_attention_fraction=fraction)


MIN_CHUNK = 1024  # least prefill chunk, for prompts longer than those planned for


@dataclass(frozen=True)
class Sizes:
    """Sizes the points of a search, as far as memory goes."""

    job: JobOnNode
    schedule: str = "micro_batches"
    page_bytes: int = PAGE_BYTES

    def fixed(self, search_point: SearchPoint) -> SearchPoint:
        """Apply the settings the schedule fixes, and normalise equivalent points to one form."""
        fraction = CPU_ATTENTION_FRACTIONS.get(self.schedule, search_point.cpu_attention_fraction)
        states_on_device = search_point.states_on_device and self.job.work.state_bytes > 0
        if self._states_stay and not states_on_device:
            fraction = 1.0  # the host has the states, and attends for all
        num_micro_batches = min(
            search_point.num_micro_batches,
            MAX_MICRO_BATCHES.get(self.schedule, search_point.num_micro_batches),
        )
        is_micro_batches = self.schedule == "micro_batches"
        return replace(
            search_point,
            cpu_attention_fraction=fraction,
            num_micro_batches=num_micro_batches,
            is_grouped=is_micro_batches and num_micro_batches > 1 and search_point.is_grouped,
            look_ahead=min(search_point.look_ahead, num_micro_batches - 1)
            if is_micro_batches
            else 0,
            slot_layers=search_point.slot_layers if self.has_ring else WHOLE_LAYERS,
            cpu_experts_fraction=search_point.cpu_experts_fraction if self.has_ring else 0.0,
            states_on_device=states_on_device,
        )

    def placement(
        self, search_point: SearchPoint, *, size_bits: int | None = None
    ) -> Placement | None:
        """Size a point: KV cache fills the rest of its memory, resident weights the device.

        Resident weights free host memory for the cache, and a larger batch leaves less device
        memory for resident weights; a second round starts from the first one's lower bound. Returns
        None where one sequence or the weight slots do not fit. `size_bits` rounds batch and cache
        sizes down to so many leading bits, so that nearby points get equal sizes.
        """
        if self.schedule in WHOLE_MODEL_SCHEDULES:
            return self._whole(search_point)
        sized = self.sized(search_point, max_num_seqs=1, num_kv_blocks=1)
        filled = self._filled(sized)
        for _ in range(2):
            if filled is None:
                return None
            free = self._free_bytes(filled)
            num_blocks = self.job.num_blocks(free, search_point)
            if size_bits is not None and num_blocks > self.job.min_blocks:
                num_blocks = max(self.job.min_blocks, _leading_bits(num_blocks, size_bits))
            max_num_seqs = self._batch_size(num_blocks, search_point, size_bits)
            if search_point.states_on_device:
                room = self._max_states(search_point)
                max_num_seqs = min(max_num_seqs, ceil(min(1.0, search_point.batch_share) * room))
            else:
                max_num_seqs = min(max_num_seqs, self._max_rows(free, num_blocks, search_point))
            if max_num_seqs < 1:
                return None
            num_blocks = self.job.useful_blocks(num_blocks, max_num_seqs)
            before, sized = (
                sized,
                self.sized(search_point, max_num_seqs=max_num_seqs, num_kv_blocks=num_blocks),
            )
            if sized.policy != before.policy:
                filled = self._filled(sized)
        if filled is None:
            return None
        needs = self.job.host_footprint(filled).total
        return filled if needs <= self.job.hardware.host_memory_bytes else None

    def _whole(self, search_point: SearchPoint) -> Placement | None:
        """A point where one memory has all weights and KV."""
        job, bare = self.job, self.sized(search_point, max_num_seqs=1, num_kv_blocks=1)
        needs, memory_bytes = job.device_footprint(bare), job.hardware.gpu_memory_bytes
        if bare.is_in_place:
            needs, memory_bytes = job.host_footprint(bare), job.hardware.host_memory_bytes
        free = memory_bytes - needs.total + needs.bytes_of("KV cache")
        num_blocks = job.num_blocks(free, search_point)
        max_num_seqs = job.max_num_seqs(num_blocks, search_point.batch_share)
        max_num_seqs = min(max_num_seqs, search_point.max_num_batched_tokens)
        max_num_seqs = min(max_num_seqs, self._max_rows(free, num_blocks, search_point))
        if max_num_seqs < 1:
            return None
        num_blocks = job.useful_blocks(num_blocks, max_num_seqs)
        return self.sized(search_point, max_num_seqs=max_num_seqs, num_kv_blocks=num_blocks)

    def sized(
        self, search_point: SearchPoint, *, max_num_seqs: int, num_kv_blocks: int
    ) -> Placement:
        """A point without resident weights where these stream, whether or not it fits."""
        if self.schedule in WHOLE_MODEL_SCHEDULES:
            policy = Policy(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=search_point.max_num_batched_tokens,
                max_prefill_chunk_tokens=search_point.max_num_batched_tokens,
                num_kv_blocks=num_kv_blocks,
                steady_admission=search_point.steady_admission,
            )
            return Placement.of_layers(self._layers, self.schedule, policy)
        num_micro_batches = min(search_point.num_micro_batches, max_num_seqs)
        has_ring = search_point.slot_layers != WHOLE_LAYERS
        policy = Policy(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=search_point.max_num_batched_tokens,
            max_prefill_chunk_tokens=min(
                ceil_div(search_point.max_num_batched_tokens, num_micro_batches),
                self._longest_chunk,
            ),
            num_kv_blocks=num_kv_blocks,
            steady_admission=search_point.steady_admission,
            device=DevicePolicy(
                num_micro_batches=num_micro_batches,
                micro_batches_per_group=num_micro_batches if search_point.is_grouped else 1,
                look_ahead=min(search_point.look_ahead, num_micro_batches - 1),
                cpu_attention_fraction=search_point.cpu_attention_fraction,
                cpu_experts_fraction=search_point.cpu_experts_fraction,
                page_bytes=self.page_bytes,
                staged_blocks=self._staged_blocks(search_point, max_num_seqs, num_micro_batches),
                states_on_device=search_point.states_on_device,
                expert_groups=EXPERT_GROUPS if has_ring else 1,
                ring_slots=round(EXPERT_GROUPS * search_point.slot_layers) if has_ring else 2,
            ),
        )
        return Placement.of_layers(self._layers, self.schedule, policy)

    def refuse(self) -> NoReturn:
        """Raise InfeasiblePlanError with the needs of the smallest policy."""
        job, grid = self.job, SearchSpace.of(self.job, self.schedule)
        tokens, layers = min(grid.max_num_batched_tokens), min(grid.slot_layers)
        search_point = self.fixed(SearchPoint(1.0, 1, False, 0, 1.0, tokens, layers, False))
        bare = self.sized(search_point, max_num_seqs=1, num_kv_blocks=job.min_blocks)
        what, on_device = f"{job.model.name} with one sequence", ON_THE_GPU_ALONE
        if bare.is_resident:
            what = f"{job.model.name} on the GPU alone"
        elif bare.streams:
            bare = self._filled(bare) or bare
            on_device = (
                f"{self._min_slots} must fit on the device; choose a larger one, or {FEWER_BITS}."
            )
        job.check_fits(bare, what=what, on_host=SHORTER_ROWS, on_device=on_device)
        raise InfeasiblePlanError(f"{what} fits {job.hardware.name}, but no policy does")

    def _filled(self, placement: Placement) -> Placement | None:
        spare = self.job.hardware.gpu_memory_bytes - self.job.device_footprint(placement).total
        if spare < 0:
            return None
        device, slots = placement.device, placement.slots_bytes
        resident_bytes = -1
        for _ in range(3):  # resident weights shrink the slots, which makes room for more
            before = resident_bytes
            resident_bytes = spare + placement.slots_bytes - slots
            if resident_bytes == before:
                break
            slots = slots_bytes(
                self._layers,
                resident_bytes,
                num_groups=device.expert_groups,
                ring_slots=min(device.ring_slots, device.expert_groups),
            )
        return self._with_resident(placement, resident_bytes)

    def _max_states(self, search_point: SearchPoint) -> int:
        """Sequences whose states the device has room for next to the weight slots."""
        one = self.sized(search_point, max_num_seqs=1, num_kv_blocks=1)
        needs = self.job.device_footprint(one)
        free = self.job.hardware.gpu_memory_bytes - needs.total + needs.bytes_of("states")
        return max_sequences(free, 0, self.job.work.state_bytes)

    def _max_rows(self, free: int, num_blocks: int, search_point: SearchPoint) -> int:
        """Sequences for whose states or windows there is room next to so many KV blocks."""
        job = self.job
        if job.work.state_bytes:
            return job.max_states(free, num_blocks)
        if job.work.window is not None:
            return job.max_windows(free, num_blocks, search_point)
        return job.workload.num_rows

    def _batch_size(self, num_blocks: int, search_point: SearchPoint, size_bits: int | None) -> int:
        max_num_seqs = min(
            self.job.max_num_seqs(num_blocks, search_point.batch_share),
            search_point.max_num_batched_tokens,
        )
        if max_num_seqs < 1 or size_bits is None:
            return max_num_seqs
        num_rows = self.job.workload.num_rows
        num_batches = ceil_div(num_rows, max_num_seqs)
        minimum = ceil_div(num_rows, num_batches + (num_batches >> (size_bits - 1)))
        return max(minimum, _leading_bits(max_num_seqs, size_bits))

    def _with_resident(self, placement: Placement, resident_bytes: int) -> Placement:
        device = replace(placement.device, resident_bytes=resident_bytes)
        policy = replace(placement.policy, device=device)
        return Placement.of_layers(self._layers, self.schedule, policy)

    def _free_bytes(self, placement: Placement) -> int:
        """Host memory beside all but KV and states."""
        bare = self.job.host_footprint(placement)
        return self.job.hardware.host_memory_bytes - bare.total + bare.bytes_of("KV cache")

    @property
    def _longest_chunk(self) -> int:
        return max(MIN_CHUNK, self.job.workload.longest_prompt_tokens)

    def _staged_blocks(
        self, search_point: SearchPoint, max_num_seqs: int, num_micro_batches: int
    ) -> int:
        if self._states_stay and not search_point.states_on_device:
            return 0
        rows = ceil_div(max_num_seqs, num_micro_batches)
        decoding = (1 - search_point.cpu_attention_fraction) * rows
        prompts = ceil_div(
            2 * search_point.max_num_batched_tokens, num_micro_batches * KV_BLOCK_TOKENS
        )
        return int(decoding * blocks_of(self.job.workload.context_tokens)) + prompts + rows

    @property
    def _states_stay(self) -> bool:
        """Whether states on the host cannot be staged, so that only the host attends."""
        return self.job.work.state_bytes > 0 and not self.job.work.stages_states

    @property
    def has_ring(self) -> bool:
        return self.schedule in RING_SCHEDULES

    @property
    def _min_slots(self) -> str:
        return "A quarter of a layer's experts" if self.has_ring else "Two layers"

    @cached_property
    def _layers(self) -> tuple[LayerBytes, ...]:
        return layer_sizes(self.job.model, self.job.work.bytes_per_element)


def _leading_bits(value: int, count: int) -> int:
    shift = max(0, value.bit_length() - count)
    return value >> shift << shift
