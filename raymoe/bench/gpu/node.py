"""Find the node of the GPU suite in its own process, as the suite must not hold GPU memory.

Arguments of `python -m` this module: the settings from `NodeSettings.to_json` and the output file.
"""

import gc
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch

from raymoe.bench.gpu.settings import NodeSettings
from raymoe.config import EngineConfig, Settings
from raymoe.device.cuda import RESERVE_BYTES
from raymoe.device.cuda_api import TorchCuda
from raymoe.device.find_gpu import check_cuda, half_dtype
from raymoe.device.threads import torch_on_all_cores
from raymoe.engine.node import find_node
from raymoe.engine.release import return_memory
from raymoe.measure.gpu import make_copies, seconds_on_stream
from raymoe.measure.profile import obtain_profile
from raymoe.memory.arena import ReusedMemory
from raymoe.specs.hardware import HardwareSpec
from raymoe.units import GIB


def measured_node(chosen: NodeSettings, settings: Settings) -> HardwareSpec:
    """The node with the memory that may be used; a GPU is measured once and stored."""
    if chosen.device == "cuda":
        check_cuda()
        obtain_profile(settings.cache_directory, chosen.num_threads or settings.num_threads)
    config = EngineConfig(
        device=chosen.device,
        hardware=chosen.hardware,
        host_memory_bytes=chosen.host_memory_bytes,
        num_threads=chosen.num_threads,
    )
    node = find_node(config, settings, chosen.device)
    free_bytes = node.gpu_memory_bytes
    if chosen.device == "cuda":
        free_bytes = torch.cuda.mem_get_info()[0] - RESERVE_BYTES
    memory_bytes = min(free_bytes, chosen.device_memory_bytes or free_bytes)
    return replace(node, gpu_memory_bytes=memory_bytes)


def main() -> None:
    chosen = NodeSettings.from_json(sys.argv[1])
    measured_node(chosen, Settings.from_environment()).to_file(Path(sys.argv[2]))


if __name__ == "__main__":
    main()


LINK_SECONDS = 1.0


def pinned_bytes_per_s(node: HardwareSpec, device: str) -> float:
    """Rate from pinned host memory to the device; the emulated rate on an emulated device."""
    if device != "cuda":
        return node.htod_bytes_per_s
    api = TorchCuda()
    with api.thread_context():
        copies = make_copies(api.device)
        api.wait_stream(torch.cuda.current_stream(api.device))
        seconds = seconds_on_stream(api, api.new_stream(), [copies.htod], LINK_SECONDS)
        rate = copies.num_bytes / seconds
        del copies
        torch.cuda.empty_cache()
    return rate


SAMPLE_BYTES = GIB  # written to learn how fast weights are loaded, before any were
PIN_FACTOR = 2.0  # loading a byte, pinning included, over writing it; a guess until it is measured


class HostMemory:
    """Host memory of one engine after another, and how fast their weights were loaded."""

    def __init__(self, num_bytes: int) -> None:
        self.reused = ReusedMemory(num_bytes)
        self._bytes_per_s = 0.0

    def load_seconds(self, num_bytes: float) -> float:
        """Expected time to load weights: by the engine before, else by writing some memory."""
        if not self._bytes_per_s:
            self.reused.restart()
            sample = self.reused.arena(SAMPLE_BYTES).memory
            with torch_on_all_cores():
                begin_s = time.perf_counter()
                sample.zero_()
                seconds = time.perf_counter() - begin_s
            self._bytes_per_s = SAMPLE_BYTES / (PIN_FACTOR * seconds)
        return num_bytes / self._bytes_per_s

    def record(self, num_bytes: float, seconds: float) -> None:
        self._bytes_per_s = num_bytes / seconds


class KernelProfile:
    """Records with torch's profiler how long kernels ran on the GPU, of all threads.

    Attributes:
        share: Share of the time inside the context in which some kernel ran; copies are none.
    """

    share = 0.0

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def __enter__(self) -> Self:
        self._profiler.start()
        self._begin_s = time.perf_counter()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        seconds = time.perf_counter() - self._begin_s
        self._profiler.stop()
        events = self._profiler.events() or ()  # type: ignore[no-untyped-call]
        spans = [
            (event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in events
            if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
        ]
        self.share = covered_s(spans) / seconds


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans lasts."""
    total_s, end_s = 0.0, -math.inf
    for begin, end in sorted(spans):
        total_s += max(0.0, end - max(begin, end_s))
        end_s = max(end_s, end)
    return total_s


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def computing_dtype(device: str) -> str:
    """The 16-bit type for products: float16 on a GPU without bfloat16."""
    return "float16" if device == "cuda" and half_dtype() == torch.float16 else "bfloat16"


def cap_device(device: str, memory_bytes: int) -> None:
    """Limit torch's GPU memory; our plan already leaves room for torch's own needs."""
    if device == "cuda":
        _, total_bytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total_bytes))


def free_device(device: str) -> None:
    """Give back what an engine left in torch's allocator, and begin to count its peak anew."""
    gc.collect()
    return_memory()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def device_peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_reserved() if device == "cuda" else 0


def device_name(device: str, node_name: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"emulated {node_name}"
