"""The node of the GPU suite, found in a process of its own: a suite must not hold a GPU's memory.

`python -m` this module: the settings, as `NodeSettings.to_json` writes them, and the file to write.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from raymoe.bench.gpu.settings import NodeSettings
from raymoe.config import EngineConfig, Settings
from raymoe.device.cuda import RESERVE_BYTES, check_cuda
from raymoe.engine.node import find_node
from raymoe.measure.profile import obtain_profile
from raymoe.specs.hardware import HardwareSpec


def measured_node(chosen: NodeSettings, settings: Settings) -> HardwareSpec:
    """The node with the memory that may be used of it; a GPU's is measured, or kept from before.

    Raises:
        ConfigError: There is no such GPU, or no such preset.
    """
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
    """Find the node and write it."""
    chosen = NodeSettings.from_json(sys.argv[1])
    measured_node(chosen, Settings.from_environment()).to_file(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
