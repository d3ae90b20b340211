"""What a builder needs to know of a pass: the pages of each layer and how the batch is cut."""

from dataclasses import dataclass
from typing import NamedTuple

from raymoe.errors import ConfigError


class Step(NamedTuple):
    """One wave in one layer."""

    layer: int
    wave: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """Into which pages the streamed weights of a layer are cut.

    Attributes:
        num_pages: Pages to load for each pass; 0 where all weights are resident.
        attention_pages: Pages that hold what `pre` and `post` read, ascending.
        expert_pages: Pages that hold what `experts` reads, ascending; a page may be in both.

    Raises:
        ConfigError: A page does not exist, is not in order, or is read by nobody.
    """

    num_pages: int
    attention_pages: tuple[int, ...] = ()
    expert_pages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("attention_pages", "expert_pages"):
            pages: tuple[int, ...] = getattr(self, name)
            if list(pages) != sorted(set(pages)):
                raise ConfigError(f"{name} is {pages}; pages are listed once, in ascending order")
        used = {*self.attention_pages, *self.expert_pages}
        if used != set(range(self.num_pages)):
            raise ConfigError(
                f"attention_pages {self.attention_pages} and expert_pages {self.expert_pages} "
                f"name {len(used)} pages; together they must name each of the {self.num_pages} "
                "pages, counted from 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassForm:
    """How one pass is cut, and where it finds the weights of its first streamed layer.

    A layer with pages is *streamed*. Streamed layers take the two weight slots of the device in
    turn, and go on doing so from pass to pass.

    Attributes:
        layers: The pages of each layer.
        num_waves: Slices of the pass that go through attention together.
        has_cpu_attention: Some rows attend on the CPU.
        has_device_attention: Some rows attend on the device, their KV blocks brought there.
        waves_per_group: Waves whose tokens meet in one expert launch, of the schedule "waves"; the
            last group of a layer may have fewer.
        look_ahead: Waves whose attention is issued beyond the wave whose experts are next, of the
            schedule "waves".
        staging_slots: Pages in the pinned staging ring; 0 where weights are pinned themselves.
        first_slot: The weight slot, 0 or 1, that holds the first streamed layer.

    Raises:
        ConfigError: A number is out of range, or no attention is computed anywhere.
    """

    layers: tuple[LayerPages, ...]
    num_waves: int
    has_cpu_attention: bool = True
    has_device_attention: bool = False
    waves_per_group: int = 1
    look_ahead: int = 2
    staging_slots: int = 0
    first_slot: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("layers is empty; a pass goes through at least one layer")
        if self.num_waves < 1:
            raise ConfigError(f"num_waves is {self.num_waves}; it must be at least 1")
        if self.waves_per_group < 1:
            raise ConfigError(f"waves_per_group is {self.waves_per_group}; it must be at least 1")
        if self.look_ahead < 0:
            raise ConfigError(f"look_ahead is {self.look_ahead}; it must be at least 0")
        if not (self.has_cpu_attention or self.has_device_attention):
            raise ConfigError("has_cpu_attention or has_device_attention must be true")
        if self.staging_slots < 0:
            raise ConfigError(f"staging_slots is {self.staging_slots}; it must be at least 0")
        if self.first_slot not in (0, 1):
            raise ConfigError(f"first_slot is {self.first_slot}; the slots are 0 and 1")

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layers)

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers with pages, ascending."""
        return tuple(layer for layer, pages in enumerate(self.layers) if pages.num_pages)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every wave in every layer, layer by layer."""
        return tuple(
            Step(layer, wave) for layer in range(self.num_layers) for wave in range(self.num_waves)
        )


def next_first_slot(form: PassForm) -> int:
    """The slot into which a pass of this form loads the first streamed layer for the next pass."""
    return (form.first_slot + len(form.streamed)) % 2
