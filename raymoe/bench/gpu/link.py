"""What the link gives to copies from pinned memory, measured just before a part runs."""

import torch

from raymoe.device.cuda_api import TorchCuda
from raymoe.measure.gpu import make_copies
from raymoe.measure.streams import seconds_on_stream
from raymoe.specs.hardware import HardwareSpec

LINK_SECONDS = 1.0


def pinned_bytes_per_s(node: HardwareSpec, device: str) -> float:
    """Rate from pinned host memory to the device; on an emulated one, the rate that it takes on."""
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
