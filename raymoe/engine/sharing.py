"""Do the engines of a node share their weights? What they have to agree on to do so.

The engine that comes first plans for itself and loads; those after it take its schedule and sizes,
which decide where each weight lies. Each still has its own KV cache, buffers and resident weights.
"""

import dataclasses
import hashlib
import json
import warnings

import torch

from raymoe._version import __version__
from raymoe.config import EngineConfig
from raymoe.errors import ConfigError, PerformanceWarning
from raymoe.memory.shared_file import SharedFile
from raymoe.plan.device_pass import StreamedPasses
from raymoe.plan.policy import DevicePolicy, Policy

FORMAT = 1  # of what lies in the memory: a change of its layout raises it


def open_shared(
    config: EngineConfig, files: str, device: str, dtype: torch.dtype
) -> SharedFile | None:
    """Open the weights that the engines of this node share; None where they do not.

    Args:
        config: Of the engine.
        files: Key of the model's files (`identity.files_key`).
        device: "cpu", "cuda" or "emulated".
        dtype: Of the computation.

    Raises:
        ConfigError: Sharing is asked for where nothing can be shared.
        ExecutionError: Something that is not ours is in the place.
    """
    if config.shared_weights is not True:
        return None
    reasons = {
        "on the device 'cpu'": device == "cpu",
        "that are dummies": config.load_format == "dummy",
        "of several ranks": config.tensor_parallel_size > 1,
    }
    for what, is_so in reasons.items():
        if is_so:
            raise ConfigError(
                f"shared_weights is True, but weights {what} are not shared; leave it out"
            )
    file = SharedFile.open(_key(files, dtype))
    chosen = choice_of(file)
    if chosen is None or chosen.suits(config):
        return file
    file.close()
    warnings.warn(
        f"the weights that other engines of this node share lie as schedule {chosen.schedule!r} "
        f"and {chosen.policy} want them; this engine is told otherwise and loads its own copy. "
        "Give all the same schedule and policy, or none.",
        PerformanceWarning,
        stacklevel=2,
    )
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Schedule and sizes of the engine that loaded the weights."""

    schedule: str
    policy: Policy

    @classmethod
    def of(cls, passes: StreamedPasses) -> "Choice":
        """The choice behind passes."""
        return cls(schedule=passes.schedule, policy=passes.policy)

    def suits(self, config: EngineConfig) -> bool:
        """Whether a configuration leaves room for it."""
        return config.policy in {None, self.policy} and config.schedule in {"auto", self.schedule}

    def note(self) -> bytes:
        """As the other engines read it."""
        return json.dumps(dataclasses.asdict(self)).encode()


def choice_of(file: SharedFile | None) -> Choice | None:
    """What the engine chose that filled the file; None where nobody has."""
    if file is None or not file.is_whole:
        return None
    plain = json.loads(file.note)
    policy = plain["policy"]
    device = policy.pop("device")
    return Choice(
        schedule=plain["schedule"],
        policy=Policy(**policy, device=None if device is None else DevicePolicy(**device)),
    )


def agree(config: EngineConfig, file: SharedFile | None) -> EngineConfig:
    """The configuration with the schedule and the sizes that the weights lie for."""
    chosen = choice_of(file)
    if chosen is None:
        return config
    return dataclasses.replace(config, schedule=chosen.schedule, policy=chosen.policy)


def _key(files: str, dtype: torch.dtype) -> str:
    # Weights are shared within one machine, where the kernel itself knows which files they are.
    return hashlib.sha256(
        " ".join([str(FORMAT), __version__, files, str(dtype)]).encode()
    ).hexdigest()[:32]
