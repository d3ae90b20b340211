"""The builders of schedules, by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from raymoe.schedule.builders.fastdecode import build_fastdecode
from raymoe.schedule.builders.flexgen import build_flexgen_s3, build_flexgen_s4
from raymoe.schedule.builders.in_place import build_in_place, build_resident
from raymoe.schedule.builders.layer_by_layer import build_layer_by_layer
from raymoe.schedule.builders.shape import PassForm
from raymoe.schedule.builders.waves import (
    build_cgopipe,
    build_module_batching,
    build_vslpipe,
    build_waves,
)
from raymoe.schedule.graph import Schedule

STREAMING_BUILDERS: Mapping[str, Callable[[PassForm], Schedule]] = MappingProxyType(
    {
        "waves": build_waves,
        "cgopipe": build_cgopipe,
        "vslpipe": build_vslpipe,
        "module_batching": build_module_batching,
        "flexgen_s3": build_flexgen_s3,
        "flexgen_s4": build_flexgen_s4,
        "fastdecode": build_fastdecode,
        "layer_by_layer": build_layer_by_layer,
    }
)
"""Those that take a `PassForm`: weights, KV or hidden states move between host and device."""

BUILDERS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {"in_place": build_in_place, "resident": build_resident, **STREAMING_BUILDERS}
)
"""All of them; "in_place" and "resident" take a number of layers."""

MOST_WAVES: Mapping[str, int] = MappingProxyType({"vslpipe": 2, "layer_by_layer": 1})
"""Schedules whose papers say into how many waves a pass is cut, at most."""

CPU_ATTENTION_FRACTIONS: Mapping[str, float] = MappingProxyType(
    {
        "cgopipe": 1.0,
        "vslpipe": 1.0,
        "flexgen_s3": 1.0,
        "fastdecode": 1.0,
        "flexgen_s4": 0.0,
        "layer_by_layer": 0.0,
    }
)
"""Schedules whose papers say who attends for decoding sequences: the share of the CPU."""
