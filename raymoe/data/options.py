"""Which options did the user give? Dataclasses or plain mappings, both are accepted."""

from collections.abc import Mapping
from typing import Any

from raymoe.config import EngineConfig, SamplingParams


def as_sampling_params(options: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Return the parameters of an operator; a mapping takes the names of `SamplingParams`."""
    if isinstance(options, SamplingParams):
        return options
    return SamplingParams.from_dict(options or {})


def as_engine_config(options: EngineConfig | Mapping[str, Any] | None) -> EngineConfig:
    """Return the configuration of an engine; a mapping takes the names of `EngineConfig`."""
    return options if isinstance(options, EngineConfig) else EngineConfig.from_dict(options or {})
