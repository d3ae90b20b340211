"""The public names are a decision, not an accident."""

import re
from pathlib import Path

import pytest

import raymoe

ROOT = Path(__file__).parent.parent

PUBLIC = [
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


def test_the_public_names_are_these() -> None:
    assert sorted(raymoe.__all__) == sorted(PUBLIC)
    assert raymoe.__all__ == sorted(raymoe.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist_and_are_documented(name: str) -> None:
    value = getattr(raymoe, name)
    assert name == "__version__" or value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'MoEGenerater'"):
        raymoe.MoEGenerater  # noqa: B018 - the access is the test


def test_python_blocks_of_the_readme_compile() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")
