"""Offline, throughput-first inference of Mixture-of-Experts language models as a Ray Data operator.

Public names load on first use, so that planning needs neither torch nor ray.
"""

import importlib
from typing import TYPE_CHECKING

from raymoe._version import __version__

if TYPE_CHECKING:
    from raymoe.config import EngineConfig, SamplingParams
    from raymoe.data.columns import explode_samples
    from raymoe.data.generator import MoEGenerator
    from raymoe.data.sizing import configure_data_context, map_batches_kwargs
    from raymoe.data.sorting import sort_by_prefix
    from raymoe.engine.engine import Engine
    from raymoe.engine.outputs import Generation
    from raymoe.plan.plan import Plan
    from raymoe.plan.policy import Policy
    from raymoe.plan.search import find_plan
    from raymoe.schedule.graph import Schedule
    from raymoe.schedule.timeline import Timeline, simulate
    from raymoe.specs.hardware import HardwareSpec
    from raymoe.specs.model import ModelSpec
    from raymoe.specs.workload import Workload

_HOMES = {
    "Engine": "raymoe.engine.engine",
    "EngineConfig": "raymoe.config",
    "Generation": "raymoe.engine.outputs",
    "HardwareSpec": "raymoe.specs.hardware",
    "MoEGenerator": "raymoe.data.generator",
    "ModelSpec": "raymoe.specs.model",
    "Plan": "raymoe.plan.plan",
    "Policy": "raymoe.plan.policy",
    "SamplingParams": "raymoe.config",
    "Schedule": "raymoe.schedule.graph",
    "Timeline": "raymoe.schedule.timeline",
    "Workload": "raymoe.specs.workload",
    "sort_by_prefix": "raymoe.data.sorting",
    "configure_data_context": "raymoe.data.sizing",
    "explode_samples": "raymoe.data.columns",
    "find_plan": "raymoe.plan.search",
    "map_batches_kwargs": "raymoe.data.sizing",
    "simulate": "raymoe.schedule.timeline",
}

__all__ = [
    "Engine",
    "EngineConfig",
    "Generation",
    "HardwareSpec",
    "MoEGenerator",
    "ModelSpec",
    "Plan",
    "Policy",
    "SamplingParams",
    "Schedule",
    "Timeline",
    "Workload",
    "__version__",
    "configure_data_context",
    "explode_samples",
    "find_plan",
    "map_batches_kwargs",
    "simulate",
    "sort_by_prefix",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'raymoe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
