"""The node to plan for: what is given, kept or measured of this machine, and what is free now."""

import dataclasses
import functools
import logging
import time

import torch

from raymoe.config import EngineConfig, Settings
from raymoe.device.cuda import free_gpu_bytes
from raymoe.device.find_gpu import why_no_gpu
from raymoe.device.host import read_host, rss_bytes
from raymoe.errors import ConfigError
from raymoe.measure.gpu import measure_gpu_quickly
from raymoe.measure.kept import identify_machine, load_profile
from raymoe.measure.plausible import find_problems
from raymoe.measure.quick import measure_quickly
from raymoe.plan.policy import Footprint
from raymoe.specs.hardware import (
    USABLE_FRACTION,
    HardwareSpec,
    MeasuredNode,
    find_hardware,
    is_hardware_file,
    preset_of_gpu,
)
from raymoe.units import GB, TB, ceil_div, format_bytes

logger = logging.getLogger(__name__)

# While an actor restarts, the kernel still frees up to hundreds of gigabytes of the former process.
PATIENCE_S, LOOK_EVERY_S = 30.0, 0.5


def check_available(
    footprint: Footprint, *, what: str, num_ranks: int = 1, already_there: int = 0
) -> None:
    """Wait up to `PATIENCE_S` for free memory, then refuse a plan that lacks it.

    Without this check the kernel would kill the process later. A given budget (`host_memory_bytes`,
    a `HardwareSpec`) may exceed what the machine or the control groups of this process have left.

    Args:
        footprint: Host memory of the plan, which is that of one rank.
        what: What needs the memory, for the message.
        already_there: Bytes of it that exist already, such as weights that others have loaded.
    """
    end_s = time.monotonic() + PATIENCE_S
    is_waiting = False
    while True:
        # What this process uses so far is part of the plan's "runtime".
        free = read_host().available_memory_bytes + rss_bytes() + already_there
        available = free // num_ranks
        if footprint.total <= available:
            return
        if time.monotonic() >= end_s:
            break
        if not is_waiting:
            is_waiting = True
            logger.info(
                "%s needs %s of host memory and %s are free: waiting up to %.0f s for more",
                what,
                format_bytes(footprint.total),
                format_bytes(available),
                PATIENCE_S,
            )
        time.sleep(LOOK_EVERY_S)
    footprint.check_fits(
        available,
        what=what,
        advice="So much is free now, as /proc/meminfo and the control groups of this process say. "
        "Reduce host_memory_bytes, end what else runs on the node, or take a larger node.",
    )


EMULATED_BY_DEFAULT = "t4"
LANE_CORES = 2  # for threads that launch kernels and copies


def find_node(
    config: EngineConfig,
    settings: Settings,
    device: str,
    *,
    loaded_bytes: int = 0,
    reserve_bytes: int = 0,
) -> HardwareSpec:
    """Return the node to plan for.

    Args:
        loaded_bytes: Shared weights that another engine has loaded: they are not free, but part of
            the plan.
        reserve_bytes: Memory of a GPU that the plan leaves free, besides that for torch.
    """
    if device == "emulated":
        node = _emulated(config, settings)
    else:
        node = _given(config, device) or _this_machine(config, settings, device)
    if config.host_memory_bytes is not None:
        node = dataclasses.replace(node, host_memory_bytes=config.host_memory_bytes)
    elif loaded_bytes:
        maximum = node.host_memory_bytes + loaded_bytes
        node = dataclasses.replace(node, host_memory_bytes=maximum)
    if device != "cpu" and config.device_memory_bytes is not None:
        node = dataclasses.replace(node, gpu_memory_bytes=config.device_memory_bytes)
    if device == "cuda" and reserve_bytes:
        left_bytes = max(node.gpu_memory_bytes - reserve_bytes, 1)  # 0 is a node without a GPU
        node = dataclasses.replace(node, gpu_memory_bytes=left_bytes)
    return node


def this_node() -> HardwareSpec:
    """Return this machine as an engine would plan for it now, by default."""
    config = EngineConfig()
    return find_node(config, Settings.from_environment(), device_name(config))


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
    """Return this machine's profile, or a quick measurement, with the memory that is free now."""
    measured = _handed(config, settings) or measured_host(config.num_threads, settings)
    measured = dataclasses.replace(measured, host_memory_bytes=_budget(settings))
    if device == "cpu":
        return measured.without_gpu()
    if config.num_threads is None and settings.num_threads is None:
        measured = dataclasses.replace(measured, num_cores=_without_lanes(measured.num_cores))
    free_bytes = free_gpu_bytes()
    if not measured.has_gpu:
        return _with_gpu(measured, free_bytes)
    return dataclasses.replace(measured, gpu_memory_bytes=free_bytes)


def _handed(config: EngineConfig, settings: Settings) -> HardwareSpec | None:
    """Return what the driver measured, if that was on a machine like this one."""
    node = config.hardware
    if not isinstance(node, MeasuredNode):
        return None
    machine = identify_machine(config.num_threads or settings.num_threads)
    return node.hardware if node.machine == machine.file_name else None


def is_like_the_driver(config: EngineConfig, settings: Settings) -> bool:
    """Whether this machine has the rates with which the driver of a job has planned."""
    return isinstance(config.hardware, HardwareSpec) or _handed(config, settings) is not None


def _without_lanes(num_cores: int) -> int:
    """Cores for the CPU's kernels where other threads feed a GPU, which must not wait for one."""
    return max(num_cores - LANE_CORES, ceil_div(num_cores, 2))


def measured_host(num_threads: int | None = None, settings: Settings | None = None) -> HardwareSpec:
    """Return the kept profile of this machine, else a quick measurement."""
    return measured_node(num_threads, settings).hardware


def measured_node(num_threads: int | None = None, settings: Settings | None = None) -> MeasuredNode:
    """Return what `measured_host` does, with the machine that it is of."""
    settings = settings or Settings.from_environment()
    num_threads = num_threads or settings.num_threads
    machine = identify_machine(num_threads)
    kept = load_profile(settings.cache_directory, machine)
    problems = [] if kept is None else find_problems(kept)
    if kept is not None and not problems:
        return MeasuredNode(machine=machine.file_name, hardware=kept)
    if problems:
        logger.warning(
            "the profile %s is not used, as it was disturbed: %s; run 'raymoe profile --again' "
            "while nothing else runs", settings.cache_directory / machine.file_name, problems[0],
        )  # fmt: skip
    return MeasuredNode(machine=machine.file_name, hardware=_measure_quickly(num_threads))


def measured_share(num_threads: int | None, count: int) -> MeasuredNode:
    """Return what one of `count` engines that run on this machine at once has of it.

    Args:
        num_threads: Threads that were chosen for each engine; None divides the cores.
    """
    node = measured_node(num_threads)
    if num_threads is not None or count == 1:
        return node
    share = node.hardware.share(count)
    machine = identify_machine(share.num_cores).file_name
    return MeasuredNode(machine=machine, hardware=share)


_measure_quickly = functools.cache(measure_quickly)


def _emulated(config: EngineConfig, settings: Settings) -> HardwareSpec:
    chosen = config.hardware
    if chosen in {None, "auto"} or isinstance(chosen, MeasuredNode):
        chosen = EMULATED_BY_DEFAULT
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
    available = int(read_host().available_memory_bytes * USABLE_FRACTION)
    return settings.host_memory_bytes or available


def _with_gpu(host: HardwareSpec, free_bytes: int) -> HardwareSpec:
    """Return this host with the preset of its GPU, or else with rates measured in two seconds."""
    name = torch.cuda.get_device_name()
    known = preset_of_gpu(name)
    if known is not None:
        return host.with_gpu_of(known, free_bytes)
    node = measure_gpu_quickly(host, free_bytes)
    logger.info(
        "no preset has the rates of the GPU %r; measured: %.0f TFLOP/s in 16 bits, memory %.0f "
        "GB/s, link %.1f GB/s to the GPU and %.1f back ('raymoe profile' measures more, once)",
        name, node.gpu_flop_per_s / TB, node.gpu_bytes_per_s / GB,
        node.htod_bytes_per_s / GB, node.dtoh_bytes_per_s / GB,
    )  # fmt: skip
    return node


def require_gpu(config: EngineConfig) -> None:
    """Refuse to run on the CPU in a process that holds a GPU, unless the configuration says so.

    Raises:
        ConfigError: torch sees no GPU; says why.
    """
    is_meant = config.device != "auto" or config.schedule == "in_place"
    if not is_meant and not torch.cuda.is_available():
        raise ConfigError(
            f"this actor holds a GPU, but torch sees none: {why_no_gpu()}; or give num_gpus=0, or "
            "the device 'cpu'"
        )


def device_name(config: EngineConfig) -> str:
    if config.device != "auto":
        return config.device
    has_gpu = config.schedule != "in_place" and torch.cuda.is_available()
    return "cuda" if has_gpu else "cpu"
