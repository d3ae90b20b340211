"""The node that an engine plans for: given, measured, or made up for the emulated device."""

import dataclasses

import torch

from raymoe.config import EngineConfig, Settings
from raymoe.device.cuda import check_cuda
from raymoe.device.host import read_host
from raymoe.device.probe import probe_host
from raymoe.errors import ConfigError
from raymoe.measure.machine import identify_machine, load_profile
from raymoe.specs.hardware import (
    HARDWARE_PRESETS,
    HardwareSpec,
    find_hardware,
    hardware_preset,
    is_hardware_file,
)

MEMORY_FRACTION = 0.85  # of what is available: Ray ends processes of a node that is 95 % full
EMULATED_BY_DEFAULT = "t4"
PROBE_S = 0.3  # enough to tell the machine's kind; `raymoe profile` takes a minute


def find_node(
    config: EngineConfig, settings: Settings, device: str, *, loaded_bytes: int = 0
) -> HardwareSpec:
    """The node to plan for.

    Args:
        config: Of the engine.
        settings: Of the environment.
        device: "cpu", "cuda" or "emulated".
        loaded_bytes: Weights that another engine has loaded for this one too: what is free does not
            count them, and the plan does.

    Raises:
        ConfigError: The hardware that is asked for does not suit the device.
    """
    if device == "emulated":
        node = _emulated(config, settings)
    else:
        node = _given(config, device) or _this_machine(config, settings, device)
    if config.host_memory_bytes is not None:
        node = dataclasses.replace(node, host_memory_bytes=config.host_memory_bytes)
    elif loaded_bytes:
        most = node.host_memory_bytes + loaded_bytes
        node = dataclasses.replace(node, host_memory_bytes=most)
    if device != "cpu" and config.device_memory_bytes is not None:
        node = dataclasses.replace(node, gpu_memory_bytes=config.device_memory_bytes)
    return node


def _given(config: EngineConfig, device: str) -> HardwareSpec | None:
    chosen = config.hardware
    if isinstance(chosen, str) and chosen != "auto":
        if not is_hardware_file(chosen):
            raise ConfigError(
                f"hardware is {chosen!r}; a preset sets the pace of the device 'emulated', the "
                f"device {device!r} runs on this machine: leave it out, or name a file"
            )
        chosen = HardwareSpec.from_file(chosen)
    if not isinstance(chosen, HardwareSpec):
        return None
    if device == "cpu":
        return chosen.without_gpu()
    if not chosen.has_gpu:
        raise ConfigError(f"hardware is {chosen.name!r}, which has no GPU, for the device 'cuda'")
    return chosen


def _this_machine(config: EngineConfig, settings: Settings, device: str) -> HardwareSpec:
    """As it was profiled, or else by a quick look, with the memory that it has now."""
    num_threads = config.num_threads or settings.num_threads
    kept = load_profile(settings.cache_directory, identify_machine(num_threads))
    measured = kept or probe_host(num_threads=num_threads, seconds=PROBE_S)
    measured = dataclasses.replace(measured, host_memory_bytes=_budget(settings))
    if device == "cpu":
        return measured.without_gpu()
    return measured if measured.has_gpu else _with_known_gpu(measured)


def _emulated(config: EngineConfig, settings: Settings) -> HardwareSpec:
    """The node whose pace is taken on, with the memory and the cores of this machine."""
    chosen = EMULATED_BY_DEFAULT if config.hardware in {None, "auto"} else config.hardware
    spec = find_hardware(chosen) if isinstance(chosen, str) else chosen
    if not spec.has_gpu:
        raise ConfigError(f"hardware is {spec.name!r}, which has no GPU to emulate")
    num_threads = config.num_threads or settings.num_threads
    return dataclasses.replace(
        spec,
        num_cores=num_threads or read_host().num_cores,
        host_memory_bytes=_budget(settings),
    )


def _budget(settings: Settings) -> int:
    available = int(read_host().available_memory_bytes * MEMORY_FRACTION)
    return settings.host_memory_bytes or available


def _with_known_gpu(host: HardwareSpec) -> HardwareSpec:
    """This host with the numbers of the preset whose name the driver's name for the GPU holds."""
    check_cuda()
    name = torch.cuda.get_device_name()
    words = name.lower().replace("-", " ").split()
    known = next((preset for preset in HARDWARE_PRESETS if preset in words), None)
    if known is None:
        raise ConfigError(
            f"the GPU {name!r} is none of the presets ({', '.join(HARDWARE_PRESETS)}); run "
            "'raymoe profile' once on this machine, or give hardware=HardwareSpec(...)"
        )
    free_bytes, _ = torch.cuda.mem_get_info()
    return host.with_gpu_of(hardware_preset(known), free_bytes)
