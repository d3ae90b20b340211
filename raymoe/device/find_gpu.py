"""Whether torch sees a GPU and why not, and what Triton lacks to compile kernels for it.

Assumes Linux. Sources: CUDA's release notes, oldest driver of each major version; Triton's
runtime/build.py and backends/nvidia/driver.py, which build a launcher in C when first used.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from raymoe.errors import ConfigError
from raymoe.kernels.triton_support import OLDEST_CAPABILITY

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # by CUDA's major version
# What PyPI has with an older CUDA than torch's newest wheels, for machines with older drivers.
TORCH_FOR_OLD_DRIVERS = ("torch==2.10.*", 12)
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"  # of PCI devices


def check_cuda(index: int = 0, root: Path = Path("/")) -> None:
    """Raise ConfigError if torch sees no such GPU, with the reason as far as it is known.

    Args:
        root: Contains proc, dev and sys; tests use their own tree.
    """
    count = torch.cuda.device_count()
    if index >= count:
        reason = f"torch sees {count} of them" if count else why_no_gpu(root)
        raise ConfigError(
            f"the device is 'cuda', but there is no GPU {index}: {reason}; or choose the device "
            "'cpu'"
        )


def half_dtype() -> torch.dtype:
    """The 16-bit type of the current GPU's products: float16 where it has none of bfloat16."""
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bfloat16 else torch.float16


def has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Whether this machine has a GPU of NVIDIA, or its driver, whether torch sees it or not."""
    if _driver(root):
        return True
    return any(
        read_text(path / "vendor").strip() == NVIDIA_VENDOR
        and read_text(path / "class").startswith(DISPLAY_CLASS)
        for path in (root / "sys/bus/pci/devices").glob("*")
    )


def why_no_gpu(root: Path = Path("/")) -> str:
    """Why torch sees no GPU, and what to do about each reason."""
    visible = os.environ.get(VISIBLE_GPUS)  # noqa: TID251 - a list of CUDA's and no setting of ours
    hidden = ""
    if visible is not None:
        hidden = f"{VISIBLE_GPUS} is {visible[:40]!r} (a Ray actor sees those of its num_gpus)"
    reasons = [_why_no_driver(root), _why_not_torch(), _why_too_old(root)]
    if visible is not None and visible.strip() in {"", "-1"}:
        reasons.append(hidden)
    reasons = [reason for reason in reasons if reason]
    unknown = (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} finds none with the driver "
        f"{_driver(root)[:80]!r} (nvidia-smi says whether it works)"
    )
    return ", and ".join(reasons) or (f"{unknown}; {hidden}" if hidden else unknown)


def _why_no_driver(root: Path) -> str:
    container = "in a container: start it with --gpus all, or in Kubernetes ask for nvidia.com/gpu"
    if not _driver(root):
        return f"no NVIDIA driver is visible here ({container})"
    if not (root / "dev/nvidiactl").exists():
        return f"there is a driver, but no /dev/nvidiactl to reach it by ({container})"
    return ""


def _why_not_torch() -> str:
    if torch.version.hip is not None:
        return (
            f"torch {torch.__version__} is built for ROCm, and raymoe's GPU path is for CUDA "
            "(pytorch.org has builds)"
        )
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA (pytorch.org has builds)"
    return ""


def _why_too_old(root: Path) -> str:
    version = re.search(r"\b(\d{3,})\.\d+(\.\d+)?\b", _driver(root))
    major = int((torch.version.cuda or "0").partition(".")[0])
    oldest = OLDEST_DRIVERS.get(major)
    if version is None or oldest is None or int(version[1]) >= oldest:
        return ""
    other, other_major = TORCH_FOR_OLD_DRIVERS
    advice = "install a newer driver"
    if other_major < major and int(version[1]) >= OLDEST_DRIVERS[other_major]:
        advice += f", or pip install '{other}', which is built for CUDA {other_major}"
    return (
        f"the driver {version[0]} is too old: torch {torch.__version__} is built for CUDA "
        f"{torch.version.cuda}, which needs {oldest} or later; {advice}"
    )


def why_not_compiled(root: Path = Path("/")) -> str:
    """What Triton lacks to compile kernels for a GPU, and what to do; empty if nothing.

    Empty without Triton too, as nothing is compiled then.
    """
    if find_spec("triton") is None:
        return ""
    named = os.environ.get("CC")  # noqa: TID251 - a variable of compilers and no setting of ours
    if not any(map(shutil.which, (named,) if named else ("gcc", "clang"))):
        missing = f"CC is {named!r}, which is no program" if named else "there is no gcc or clang"
        return f"{missing}: install one (apt install gcc)"
    header = root / sysconfig.get_paths()["include"].lstrip("/") / "Python.h"
    if not header.exists():
        return f"there is no {header}: install Python's headers (apt install python3-dev)"
    if not _finds_libcuda():
        return (
            "ldconfig does not know libcuda.so.1 of the driver: run ldconfig as root, or set "
            "TRITON_LIBCUDA_PATH to the directory that has it"
        )
    return ""


def check_compiler(capability: tuple[int, int]) -> None:
    """Raise ConfigError if Triton is installed and would run on such a GPU but cannot compile."""
    reason = why_not_compiled() if capability >= OLDEST_CAPABILITY else ""
    if reason:
        raise ConfigError(
            f"Triton cannot compile kernels for the GPU: {reason}. Without the package triton, "
            "kernels of torch run, several times slower"
        )


def _finds_libcuda() -> bool:
    paths = [os.environ.get(name, "") for name in ("TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH")]  # noqa: TID251 - of Triton and the linker
    if any((Path(part) / "libcuda.so.1").exists() for path in paths for part in path.split(":")):
        return True
    tool = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-p"], capture_output=True, text=True, check=False).stdout
    return "libcuda.so.1" in listed


def _driver(root: Path) -> str:
    return read_text(root / "proc/driver/nvidia/version").partition("\n")[0]


def read_text(path: Path) -> str:
    """The text of a file of proc or sys; empty if it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""
