"""Passes of a model on a node with a GPU, simulated whole or from a few layers."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from raymoe.plan.device_cost import DeviceCost
from raymoe.plan.load import PassLoad
from raymoe.plan.pages import PageCut
from raymoe.plan.streaming import StreamedPasses
from raymoe.plan.work import ModelWork
from raymoe.schedule.builders.shape import PassForm
from raymoe.schedule.graph import Schedule
from raymoe.schedule.simulate import simulate
from raymoe.schedule.timeline import Timeline
from raymoe.specs.hardware import HardwareSpec

# Layers of a model are alike, and two slots make the pattern repeat after two of them: the time of
# a pass grows by the same amount with every pair of layers beyond the first.
FEW_LAYERS, MORE_LAYERS = 2, 4


@dataclass(frozen=True)
class DevicePass:
    """Passes of a model on a node with a GPU.

    Attributes:
        work: The model in numbers.
        hardware: The node.
        passes: Schedule and sizes.
    """

    work: ModelWork
    hardware: HardwareSpec
    passes: StreamedPasses

    def timeline(self, load: PassLoad) -> Timeline:
        """The whole pass, all layers."""
        return _simulate(self, self.schedule(load), self.work, self.passes.cut, load)

    def schedule(self, load: PassLoad) -> Schedule:
        """The schedule of the whole pass."""
        return self.passes.build(_form(self.passes, load))

    def seconds(self, load: PassLoad) -> float:
        """Its length from a few of the layers; a pass of few layers is simulated whole."""
        if not load.tokens:
            return 0.0
        samples = self._samples
        if len(samples) == 1:
            return self._sampled_s(samples[0], load)
        few_s, more_s = (self._sampled_s(sample, load) for sample in samples)
        each_s = (more_s - few_s) / (MORE_LAYERS - FEW_LAYERS)
        return more_s + each_s * (len(self.work.layers) - MORE_LAYERS)

    def _sampled_s(self, sample: "_Sample", load: PassLoad) -> float:
        schedule = sample.schedule(_form(self.passes, load))
        return _simulate(self, schedule, sample.work, sample.cut, load).makespan_s

    @cached_property
    def _samples(self) -> tuple["_Sample", ...]:
        num_layers = len(self.work.layers)
        if num_layers <= MORE_LAYERS:
            return (_Sample(self.work, self.passes),)
        return tuple(
            _Sample(_last_layers(self.work, count), _last_passes(self.passes, count))
            for count in (FEW_LAYERS, MORE_LAYERS)
        )


@dataclass(frozen=True)
class _Sample:
    """Some layers of a model, with schedules for those who attend."""

    work: ModelWork
    passes: StreamedPasses
    _schedules: dict[PassForm, Schedule] = field(default_factory=dict)

    @property
    def cut(self) -> PageCut:
        return self.passes.cut

    def schedule(self, form: PassForm) -> Schedule:
        form = replace(form, layers=self.cut.layers)
        if form not in self._schedules:
            self._schedules[form] = self.passes.build(form)
        return self._schedules[form]


def _form(passes: StreamedPasses, load: PassLoad) -> PassForm:
    """Who attends for this load; see `runtime.waves.Division`."""
    fraction = passes.cpu_attention_fraction
    on_device = load.prompt_tokens > 0 or (load.decode_rows > 0 and fraction < 1)
    return replace(
        passes.form,
        has_device_attention=on_device,
        has_cpu_attention=load.decode_rows > 0 and fraction > 0,
    )


def _simulate(  # noqa: PLR0917 - a model, whole or in part
    model: DevicePass, schedule: Schedule, work: ModelWork, cut: PageCut, load: PassLoad
) -> Timeline:
    passes = model.passes
    cost = DeviceCost.of_schedule(
        schedule,
        work,
        model.hardware,
        waves=load.waves(passes.num_waves, passes.cpu_attention_fraction),
        page_bytes=cut.page_bytes,
    )
    return simulate(schedule, cost)


def _last_layers(work: ModelWork, count: int) -> ModelWork:
    """The last layers: the first ones of a model may be dense."""
    return replace(work, layers=work.layers[-count:])


def _last_passes(passes: StreamedPasses, count: int) -> StreamedPasses:
    """The last layers with pages as large as those of all layers are on average."""
    cut = passes.cut
    mean = sum(map(sum, cut.page_bytes)) / len(cut.page_bytes)
    of_these = sum(map(sum, cut.page_bytes[-count:])) / count
    scale = mean / of_these if of_these else 1.0
    sampled = replace(
        cut,
        layers=cut.layers[-count:],
        page_bytes=tuple(
            tuple(round(scale * size) for size in pages) for pages in cut.page_bytes[-count:]
        ),
    )
    return replace(passes, cut=sampled)
