"""Offline, throughput-first inference of Mixture-of-Experts language models as a Ray Data operator.

Public names load on first use, so that planning needs neither torch nor ray.
"""

import importlib
from typing import TYPE_CHECKING

from raymoe._version import __version__
from raymoe.shadows import find_shadow, first_directory

if TYPE_CHECKING:
    from raymoe.assets import demo_model_path
    from raymoe.config import EngineConfig, SamplingParams
    from raymoe.data.columns import explode_samples
    from raymoe.data.generator import MoEGenerator
    from raymoe.data.processor import MoEEngineProcessorConfig, build_processor, generate
    from raymoe.data.sizing import configure_data_context, map_batches_kwargs
    from raymoe.data.sorting import sort_by_prefix
    from raymoe.engine.engine import Engine
    from raymoe.engine.outputs import Generation
    from raymoe.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        ExecutionError,
        InfeasiblePlanError,
        PerformanceWarning,
        RaymoeError,
        RaymoeWarning,
        ScheduleError,
        UnknownOptionError,
        UnsupportedModelError,
        WorkerProcessError,
    )
    from raymoe.plan.plan import Plan
    from raymoe.plan.policy import Policy
    from raymoe.plan.search import find_plan
    from raymoe.schedule.graph import Schedule
    from raymoe.schedule.timeline import Timeline, simulate
    from raymoe.specs.hardware import HardwareSpec
    from raymoe.specs.model import ModelSpec
    from raymoe.specs.workload import Workload

_HOMES = {
    "CapacityError": "raymoe.errors",
    "CheckpointError": "raymoe.errors",
    "ConfigError": "raymoe.errors",
    "Engine": "raymoe.engine.engine",
    "EngineConfig": "raymoe.config",
    "ExecutionError": "raymoe.errors",
    "Generation": "raymoe.engine.outputs",
    "HardwareSpec": "raymoe.specs.hardware",
    "InfeasiblePlanError": "raymoe.errors",
    "MoEEngineProcessorConfig": "raymoe.data.processor",
    "MoEGenerator": "raymoe.data.generator",
    "ModelSpec": "raymoe.specs.model",
    "PerformanceWarning": "raymoe.errors",
    "Plan": "raymoe.plan.plan",
    "Policy": "raymoe.plan.policy",
    "RaymoeError": "raymoe.errors",
    "RaymoeWarning": "raymoe.errors",
    "SamplingParams": "raymoe.config",
    "Schedule": "raymoe.schedule.graph",
    "ScheduleError": "raymoe.errors",
    "Timeline": "raymoe.schedule.timeline",
    "UnknownOptionError": "raymoe.errors",
    "UnsupportedModelError": "raymoe.errors",
    "WorkerProcessError": "raymoe.errors",
    "Workload": "raymoe.specs.workload",
    "build_processor": "raymoe.data.processor",
    "configure_data_context": "raymoe.data.sizing",
    "demo_model_path": "raymoe.assets",
    "explode_samples": "raymoe.data.columns",
    "find_plan": "raymoe.plan.search",
    "generate": "raymoe.data.processor",
    "map_batches_kwargs": "raymoe.data.sizing",
    "simulate": "raymoe.schedule.timeline",
    "sort_by_prefix": "raymoe.data.sorting",
}

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "ExecutionError",
    "Generation",
    "HardwareSpec",
    "InfeasiblePlanError",
    "MoEEngineProcessorConfig",
    "MoEGenerator",
    "ModelSpec",
    "PerformanceWarning",
    "Plan",
    "Policy",
    "RaymoeError",
    "RaymoeWarning",
    "SamplingParams",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "UnknownOptionError",
    "UnsupportedModelError",
    "WorkerProcessError",
    "Workload",
    "__version__",
    "build_processor",
    "configure_data_context",
    "demo_model_path",
    "explode_samples",
    "find_plan",
    "generate",
    "map_batches_kwargs",
    "simulate",
    "sort_by_prefix",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'raymoe' has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOMES[name])
    except (ImportError, AttributeError) as error:
        shadow = find_shadow(first_directory())
        if shadow is None:
            raise
        raise ImportError(shadow) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
