"""The GPU of a part: the type it computes in, its cap, and how much of it was used."""

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def computing_dtype(device: str) -> str:
    """The 16-bit type that the device multiplies: float16 where a GPU has no bfloat16."""
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float16"
    return "bfloat16"


def cap_device(device: str, memory_bytes: int) -> None:
    """Let torch take no more of a GPU than that, whatever engine asks.

    The plan of our engine holds back what torch takes beside it, so that it has no need of more.
    """
    if device == "cuda":
        _, total_bytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total_bytes))


def device_peak_bytes(device: str) -> int:
    """Most device memory that torch held; 0 where there is none."""
    return torch.cuda.max_memory_reserved() if device == "cuda" else 0


def device_name(device: str, node_name: str) -> str:
    """As the driver calls it, or the preset that is emulated."""
    return torch.cuda.get_device_name() if device == "cuda" else f"emulated {node_name}"
