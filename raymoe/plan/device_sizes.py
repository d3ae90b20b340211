"""From a point of the search to a policy that fits host and device memory."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.device_job import DeviceJob, blocks_of
from raymoe.plan.device_memory import (
    device_footprint,
    host_footprint,
    kv_block_bytes,
    weight_slots_bytes,
)
from raymoe.plan.knobs import Grid, Knobs
from raymoe.plan.pages import LayerBytes, layer_sizes
from raymoe.plan.policy import PAGE_BYTES, DevicePolicy, Policy
from raymoe.plan.streaming import KV_BLOCK_TOKENS, StreamedPasses
from raymoe.schedule.builders import CPU_ATTENTION_FRACTIONS, MOST_WAVES
from raymoe.units import ceil_div

LEAST_CHUNK = 1024  # tokens of a prompt in a pass, for rows that are longer than those planned for


@dataclass(frozen=True)
class DeviceSizes:
    """Sizes the passes of one job.

    Attributes:
        job: The job.
        schedule: "waves", or a schedule whose paper fixes some of the knobs.
        page_bytes: Largest page of weights.
    """

    job: DeviceJob
    schedule: str = "waves"
    page_bytes: int = PAGE_BYTES

    def fixed(self, knobs: Knobs) -> Knobs:
        """The point with what the schedule fixes, and what means the same in one form."""
        fraction = CPU_ATTENTION_FRACTIONS.get(self.schedule, knobs.cpu_attention_fraction)
        num_waves = min(knobs.num_waves, MOST_WAVES.get(self.schedule, knobs.num_waves))
        is_waves = self.schedule == "waves"
        return replace(
            knobs,
            cpu_attention_fraction=fraction,
            num_waves=num_waves,
            is_grouped=is_waves and num_waves > 1 and knobs.is_grouped,
            look_ahead=min(knobs.look_ahead, num_waves - 1) if is_waves else 0,
        )

    def passes(self, knobs: Knobs, *, size_bits: int | None = None) -> StreamedPasses | None:
        """Sizes of a point: the KV cache takes what the host has left, weights that of the device.

        What stays on the device leaves the host to the cache, a larger batch leaves less of the
        device to what stays; the second round starts from what the first one leaves at least.

        None where not even one sequence, or no slot for the weights, fits.

        Args:
            knobs: The point.
            size_bits: Leading bits of batch and cache that are kept, the rest rounded down, so that
                points that are close have the same; all by default.
        """
        sized = self.sized(knobs, batch_size=1, num_kv_blocks=1)
        filled = self._filled(sized)
        for _ in range(2):
            if filled is None:
                return None
            num_blocks = self._free_blocks(filled)
            if size_bits is not None and num_blocks > self.job.least_blocks:
                num_blocks = max(self.job.least_blocks, _leading_bits(num_blocks, size_bits))
            batch_size = self._batch_size(num_blocks, knobs, size_bits)
            if batch_size < 1:
                return None
            num_blocks = self.job.useful_blocks(num_blocks, batch_size)
            before, sized = (
                sized,
                self.sized(knobs, batch_size=batch_size, num_kv_blocks=num_blocks),
            )
            if sized.policy != before.policy:
                filled = self._filled(sized)
        return filled if filled and self._free_blocks(filled) >= num_blocks else None

    def sized(self, knobs: Knobs, *, batch_size: int, num_kv_blocks: int) -> StreamedPasses:
        """The passes of a point with nothing resident, whether or not they fit."""
        num_waves = min(knobs.num_waves, batch_size)
        policy = Policy(
            batch_size=batch_size,
            pass_tokens=knobs.pass_tokens,
            prefill_chunk_tokens=min(ceil_div(knobs.pass_tokens, num_waves), self._longest_chunk),
            num_kv_blocks=num_kv_blocks,
            device=DevicePolicy(
                num_waves=num_waves,
                waves_per_group=num_waves if knobs.is_grouped else 1,
                look_ahead=min(knobs.look_ahead, num_waves - 1),
                cpu_attention_fraction=knobs.cpu_attention_fraction,
                page_bytes=self.page_bytes,
                staged_blocks=self._staged_blocks(knobs, batch_size, num_waves),
            ),
        )
        return StreamedPasses.of_layers(self._layers, self.schedule, policy)

    def refuse(self) -> NoReturn:
        """Say what the smallest policy needs, where no policy fits.

        Raises:
            InfeasiblePlanError: With the table of the memory that does not hold it.
        """
        knobs = Knobs(1.0, 1, False, 0, 1.0, min(Grid().pass_tokens))
        bare = self.sized(knobs, batch_size=1, num_kv_blocks=self.job.least_blocks)
        sized = self._filled(bare) or bare
        what = f"{self.job.model.name} with one sequence"
        host_footprint(self.job.model, self.job.work, sized).check_fits(
            self.job.hardware.host_memory_bytes,
            what=what,
            advice="Choose a node with more host memory, shorter sequences (max_context_tokens; "
            "--max-context), or weights in fewer bits.",
        )
        device_footprint(self.job.model, self.job.work, sized).check_fits(
            self.job.hardware.gpu_memory_bytes,
            what=what,
            advice="Two layers must fit on the device; choose a larger one, or weights in fewer "
            "bits.",
        )
        raise InfeasiblePlanError(f"{what} fits {self.job.hardware.name}, but no policy does")

    def _filled(self, passes: StreamedPasses) -> StreamedPasses | None:
        """Passes with nothing resident, and then with all that the device has room for."""
        spare = self.job.hardware.gpu_memory_bytes
        spare -= device_footprint(self.job.model, self.job.work, passes).total
        if spare < 0:
            return None
        filled, resident_bytes = passes, -1
        for _ in range(3):  # what stays makes the slots smaller, which makes room for more
            before = resident_bytes
            shrunk = weight_slots_bytes(passes.cut) - weight_slots_bytes(filled.cut)
            resident_bytes = spare + shrunk
            if resident_bytes == before:
                break
            filled = self._with_resident(passes, resident_bytes)
        return filled

    def _batch_size(self, num_blocks: int, knobs: Knobs, size_bits: int | None) -> int:
        """Sequences at once; rounded only as far as the batches of all rows grow as little."""
        batch_size = min(self.job.batch_size(num_blocks, knobs.batch_share), knobs.pass_tokens)
        if batch_size < 1 or size_bits is None:
            return batch_size
        num_rows = self.job.workload.num_rows
        num_batches = ceil_div(num_rows, batch_size)
        least = ceil_div(num_rows, num_batches + (num_batches >> (size_bits - 1)))
        return max(least, _leading_bits(batch_size, size_bits))

    def _with_resident(self, passes: StreamedPasses, resident_bytes: int) -> StreamedPasses:
        device = replace(passes.device, resident_bytes=resident_bytes)
        policy = replace(passes.policy, device=device)
        return StreamedPasses.of_layers(self._layers, self.schedule, policy)

    def _free_blocks(self, passes: StreamedPasses) -> int:
        """KV blocks that the host has room for beside everything else."""
        bare = host_footprint(self.job.model, self.job.work, passes)
        free = self.job.hardware.host_memory_bytes - bare.total + bare.bytes_of("KV cache")
        return free // kv_block_bytes(self.job.work)

    @property
    def _longest_chunk(self) -> int:
        """Of a prompt: whole prompts where they are short, as the largest wave has one to spare."""
        return max(LEAST_CHUNK, self.job.workload.longest_prompt_tokens)

    def _staged_blocks(self, knobs: Knobs, batch_size: int, num_waves: int) -> int:
        """Room for the device's share of a wave: decoding sequences, and the prompts of a wave."""
        rows = ceil_div(batch_size, num_waves)
        decoding = (1 - knobs.cpu_attention_fraction) * rows
        prompts = ceil_div(2 * knobs.pass_tokens, num_waves * KV_BLOCK_TOKENS)
        return int(decoding * blocks_of(self.job.workload.context_tokens)) + prompts + rows

    @cached_property
    def _layers(self) -> tuple[LayerBytes, ...]:
        return layer_sizes(self.job.model, self.job.work.bytes_per_element)


def _leading_bits(value: int, count: int) -> int:
    """The value with all but its first bits set to zero."""
    shift = max(0, value.bit_length() - count)
    return value >> shift << shift
