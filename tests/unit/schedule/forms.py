"""Passes to build: by hand, and at random."""

import itertools
from dataclasses import replace

from hypothesis import strategies as st

from raymoe.schedule.builders import RING_SCHEDULES, STREAMING_BUILDERS
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import StepForm

MAX_MICRO_BATCHES = {"vslpipe": 2}  # of the builders; papers may take fewer
DEVICE_ONLY = ("flexgen_s4",)
BUILDER_NAMES = tuple(STREAMING_BUILDERS)


def layer_of(num_pages: int, **parts: object) -> LayerPlacement:
    """A layer with so many pages, whose bytes nobody asks for."""
    return LayerPlacement(page_bytes=(0,) * num_pages, **parts)


def streamed_layer(num_pages: int = 3) -> LayerPlacement:
    """The first page is attention and some of the experts, the others are experts."""
    return layer_of(num_pages, attention_pages=(0,), expert_pages=tuple(range(num_pages)))


def uniform_form(num_layers: int = 2, num_micro_batches: int = 3, num_pages: int = 3) -> StepForm:
    return StepForm(
        layers=(streamed_layer(num_pages),) * num_layers, num_micro_batches=num_micro_batches
    )


def form_for(name: str, num_layers: int, num_micro_batches: int, num_pages: int) -> StepForm:
    """Attention where the paper has it."""
    return StepForm(
        layers=(streamed_layer(num_pages),) * num_layers,
        num_micro_batches=min(num_micro_batches, MAX_MICRO_BATCHES.get(name, num_micro_batches)),
        has_cpu_attention=name not in DEVICE_ONLY,
        has_device_attention=name in DEVICE_ONLY,
    )


@st.composite
def layer_pages(draw: st.DrawFn, min_pages: int = 0, max_pages: int = 5) -> LayerPlacement:
    num_pages = draw(st.integers(min_pages, max_pages))
    users = draw(
        st.lists(
            st.sampled_from(("pre", "experts", "both")), min_size=num_pages, max_size=num_pages
        )
    )
    return layer_of(
        num_pages,
        attention_pages=tuple(p for p, user in enumerate(users) if user != "experts"),
        expert_pages=tuple(p for p, user in enumerate(users) if user != "pre"),
    )


@st.composite
def grouped_layer_pages(draw: st.DrawFn) -> LayerPlacement:
    """What is common is read by attention, by the experts or both; the rest by a group of them."""
    common = draw(layer_pages(max_pages=2))
    sizes = draw(st.lists(st.integers(1, 2), max_size=5))
    ends = list(itertools.accumulate(sizes, initial=common.num_pages))
    return replace(
        common,
        page_bytes=(0,) * ends[-1],
        expert_pages=(*common.expert_pages, *range(common.num_pages, ends[-1])),
        group_pages=tuple(tuple(range(*ends)) for ends in itertools.pairwise(ends)),
    )


@st.composite
def partly_on_cores(draw: st.DrawFn, layers: st.SearchStrategy[LayerPlacement]) -> LayerPlacement:
    """A layer of which cores compute some experts, with the last pages or without any."""
    pages = draw(layers)
    if draw(st.booleans()):
        return pages
    first = pages.num_pages
    while first and first - 1 not in pages.attention_pages:
        first -= 1
    count = draw(st.integers(first, pages.num_pages))
    groups = (tuple(page for page in group if page < count) for group in pages.group_pages)
    groups = tuple(filter(None, groups))
    start = draw(st.integers(bool(groups), 3))
    return replace(
        pages,
        page_bytes=(0,) * count,
        expert_pages=tuple(page for page in pages.expert_pages if page < count),
        group_pages=groups,
        host_experts=range(start, start + 2),
        num_host_pages=pages.num_pages - count,
    )


def grouped_layer(num_groups: int = 4, *, has_common: bool = True) -> LayerPlacement:
    """A page for attention, which may be resident, and one for each group of experts."""
    pages = tuple(range(has_common, has_common + num_groups))
    return layer_of(
        len(pages) + has_common,
        attention_pages=(0,) * has_common,
        expert_pages=pages,
        group_pages=tuple((page,) for page in pages),
    )


@st.composite
def step_forms(
    draw: st.DrawFn,
    name: str = "micro_batches",
    *,
    min_pages: int = 0,
    min_micro_batches: int = 1,
    max_staging_slots: int = 3,
) -> StepForm:
    """Any step that the builder `name` supports, where it can with groups of experts."""
    has_groups = name in RING_SCHEDULES and not min_pages and draw(st.booleans())
    layers = grouped_layer_pages() if has_groups else layer_pages(min_pages)
    if name in RING_SCHEDULES and not min_pages and draw(st.booleans()):
        layers = partly_on_cores(layers)
    on_cpu, on_device = draw(st.sampled_from(((True, False), (False, True), (True, True))))
    num_micro_batches = draw(st.integers(min_micro_batches, MAX_MICRO_BATCHES.get(name, 6)))
    layers = st.builds(
        lambda pages, on_device: replace(pages, states_on_device=on_device),
        layers,
        st.booleans() if draw(st.booleans()) else st.just(False),
    )
    return StepForm(
        layers=tuple(draw(st.lists(layers, min_size=1, max_size=5))),
        num_micro_batches=num_micro_batches,
        micro_batches_per_group=draw(st.integers(1, num_micro_batches + 1)),
        look_ahead=draw(st.integers(0, num_micro_batches + 2)),
        has_cpu_attention=on_cpu,
        has_device_attention=on_device,
        staging_slots=draw(st.integers(0, max_staging_slots)),
        first_slot=draw(st.integers(0, 1)),
        ring_slots=draw(st.integers(1, 6)) if has_groups else 0,
    )
