"""How passes of a model whose weights stream are cut by a schedule and its policy, in sizes.

What the engine allocates and what the planner counts is decided here, once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Self

from raymoe.plan.pages import LayerBytes, PageCut, cut_pages, layer_sizes
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.schedule.builders import CPU_ATTENTION_FRACTIONS, MOST_WAVES, STREAMING_BUILDERS
from raymoe.schedule.builders.shape import LayerPages, PassForm
from raymoe.schedule.graph import Schedule
from raymoe.schedule.task import Op
from raymoe.specs.model import ModelSpec
from raymoe.units import ceil_div

KV_BLOCK_TOKENS = 32
LEAST_STAGED_BLOCKS = 256  # of a wave: the contexts of 16 rows of 512 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedPasses:
    """The passes of one schedule with one policy.

    Attributes:
        schedule: A name of `STREAMING_BUILDERS`.
        policy: Sizes of passes.
        device: How the device is used.
        cut: Which weights stay on the device, and the pages of the rest.
    """

    schedule: str
    policy: Policy
    device: DevicePolicy
    cut: PageCut

    @classmethod
    def of(cls, model: ModelSpec, schedule: str, policy: Policy, bytes_per_element: int) -> Self:
        """Cut the weights of a model, which take `bytes_per_element` where they are not quantised.

        Raises:
            ConfigError: The policy's sizes are out of range.
        """
        return cls.of_layers(layer_sizes(model, bytes_per_element), schedule, policy)

    @classmethod
    def of_layers(cls, sizes: tuple[LayerBytes, ...], schedule: str, policy: Policy) -> Self:
        """Cut layers of these sizes.

        Raises:
            ConfigError: The policy's sizes are out of range.
        """
        device = policy.device or DevicePolicy()
        cut = cut_pages(sizes, page_bytes=device.page_bytes, resident_bytes=device.resident_bytes)
        return cls(schedule=schedule, policy=policy, device=device, cut=cut)

    @property
    def build(self) -> Callable[[PassForm], Schedule]:
        """The builder of the schedule."""
        return STREAMING_BUILDERS[self.schedule]

    @property
    def num_waves(self) -> int:
        """Into how many waves a pass is cut."""
        return min(self.device.num_waves, MOST_WAVES.get(self.schedule, self.device.num_waves))

    @property
    def cpu_attention_fraction(self) -> float:
        """Share of the decoding sequences for which the CPU attends."""
        return CPU_ATTENTION_FRACTIONS.get(self.schedule, self.device.cpu_attention_fraction)

    @property
    def form(self) -> PassForm:
        """A pass in which both sides attend."""
        return PassForm(
            layers=self.cut.layers,
            num_waves=self.num_waves,
            has_device_attention=True,
            waves_per_group=self.device.waves_per_group,
            look_ahead=self.device.look_ahead,
            staging_slots=self.device.staging_slots,
        )

    @property
    def ring(self) -> int:
        """Waves whose attention is under way at once."""
        return _shape(self.schedule, self._bare_form).ring

    @property
    def waves_per_group(self) -> int:
        """Waves whose tokens meet in one expert launch."""
        return _shape(self.schedule, self._bare_form).waves_per_group

    @property
    def _bare_form(self) -> PassForm:
        """As many layers as tell how waves follow each other, without pages."""
        return replace(self.form, layers=(LayerPages(num_pages=0),) * min(2, len(self.cut.layers)))

    @property
    def wave_tokens(self) -> int:
        """No wave is larger: dealing to the smallest exceeds the mean by one chunk at most."""
        policy = self.policy
        mean = ceil_div(policy.pass_tokens, self.num_waves)
        return min(policy.pass_tokens, mean + policy.prefill_chunk_tokens)

    @property
    def staged_blocks(self) -> int:
        """KV blocks of one wave that the device has room for."""
        blocks = self.device.staged_blocks
        if blocks is None:
            blocks = max(LEAST_STAGED_BLOCKS, 2 * ceil_div(self.wave_tokens, KV_BLOCK_TOKENS))
        return min(blocks, self.policy.num_kv_blocks)


class _Shape(NamedTuple):
    ring: int
    waves_per_group: int


@lru_cache(maxsize=1024)
def _shape(schedule: str, form: PassForm) -> _Shape:
    """What the tasks of a schedule say of the buffers they take."""
    tasks = STREAMING_BUILDERS[schedule](form).tasks
    places = [buffer.key[0] for task in tasks for buffer in task.writes if buffer.name == "qkv"]
    groups = [len(task.writes) for task in tasks if task.op is Op.EXPERTS]
    return _Shape(ring=1 + max(places), waves_per_group=max(groups))
