"""Find the node of the GPU suite in its own process, as the suite must not hold GPU memory.

Arguments of `python -m` this module: the settings from `NodeSettings.to_json` and the output file.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from raymoe.bench.gpu.settings import NodeSettings
from raymoe.config import EngineConfig, Settings
from raymoe.device.cuda import RESERVE_BYTES, check_cuda
from raymoe.device.cuda_api import TorchCuda
from raymoe.engine.loading import find_node
from raymoe.measure.gpu import make_copies, seconds_on_stream
from raymoe.measure.profile import obtain_profile
from raymoe.specs.hardware import HardwareSpec


def measured_node(chosen: NodeSettings, settings: Settings) -> HardwareSpec:
    """The node with the memory that may be used; a GPU is measured once and stored."""
    if chosen.device == "cuda":
        check_cuda()
        obtain_profile(settings.cache_directory, chosen.num_threads or settings.num_threads)
    config = EngineConfig(
        device=chosen.device,
        hardware=chosen.hardware,
        host_memory_bytes=chosen.host_memory_bytes,
        device_memory_bytes=chosen.device_memory_bytes,
        num_threads=chosen.num_threads,
    )
    node = find_node(config, settings, chosen.device)
    if chosen.device == "cuda" and chosen.device_memory_bytes is None:
        free_bytes, _ = torch.cuda.mem_get_info()
        node = replace(node, gpu_memory_bytes=free_bytes - RESERVE_BYTES)
    return node


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


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def computing_dtype(device: str) -> str:
    """The 16-bit type for products: float16 on a GPU without bfloat16."""
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float16"
    return "bfloat16"


def cap_device(device: str, memory_bytes: int) -> None:
    """Limit torch's GPU memory; our plan already leaves room for torch's own needs."""
    if device == "cuda":
        _, total_bytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total_bytes))


def device_peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_reserved() if device == "cuda" else 0


def device_name(device: str, node_name: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"emulated {node_name}"
