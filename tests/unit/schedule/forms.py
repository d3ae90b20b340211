"""Passes to build: by hand, and at random."""

from hypothesis import strategies as st

from raymoe.schedule.builders import STREAMING_BUILDERS
from raymoe.schedule.program import LayerPages, PassForm

MAX_WAVES = {"vslpipe": 2}  # of the builders; papers may take fewer
DEVICE_ONLY = ("flexgen_s4",)
BUILDER_NAMES = tuple(STREAMING_BUILDERS)


def streamed_layer(num_pages: int = 3) -> LayerPages:
    """The first page is attention and some of the experts, the others are experts."""
    return LayerPages(
        num_pages=num_pages, attention_pages=(0,), expert_pages=tuple(range(num_pages))
    )


def uniform_form(num_layers: int = 2, num_waves: int = 3, num_pages: int = 3) -> PassForm:
    return PassForm(layers=(streamed_layer(num_pages),) * num_layers, num_waves=num_waves)


def form_for(name: str, num_layers: int, num_waves: int, num_pages: int) -> PassForm:
    """Attention where the paper has it."""
    return PassForm(
        layers=(streamed_layer(num_pages),) * num_layers,
        num_waves=min(num_waves, MAX_WAVES.get(name, num_waves)),
        has_cpu_attention=name not in DEVICE_ONLY,
        has_device_attention=name in DEVICE_ONLY,
    )


@st.composite
def layer_pages(draw: st.DrawFn, min_pages: int = 0) -> LayerPages:
    num_pages = draw(st.integers(min_pages, 5))
    users = draw(
        st.lists(
            st.sampled_from(("pre", "experts", "both")), min_size=num_pages, max_size=num_pages
        )
    )
    return LayerPages(
        num_pages=num_pages,
        attention_pages=tuple(p for p, user in enumerate(users) if user != "experts"),
        expert_pages=tuple(p for p, user in enumerate(users) if user != "pre"),
    )


@st.composite
def pass_forms(
    draw: st.DrawFn,
    name: str = "waves",
    *,
    min_pages: int = 0,
    min_waves: int = 1,
    max_staging_slots: int = 3,
) -> PassForm:
    """Any pass that the builder `name` takes."""
    on_cpu, on_device = draw(st.sampled_from(((True, False), (False, True), (True, True))))
    num_waves = draw(st.integers(min_waves, MAX_WAVES.get(name, 6)))
    return PassForm(
        layers=tuple(draw(st.lists(layer_pages(min_pages), min_size=1, max_size=5))),
        num_waves=num_waves,
        waves_per_group=draw(st.integers(1, num_waves + 1)),
        look_ahead=draw(st.integers(0, num_waves + 2)),
        has_cpu_attention=on_cpu,
        has_device_attention=on_device,
        staging_slots=draw(st.integers(0, max_staging_slots)),
        first_slot=draw(st.integers(0, 1)),
    )
