"""What cores, memory, GPU and link reach, measured for a few seconds."""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from raymoe import _native
from raymoe.device.cuda_api import CudaApi, EventT, PinnedMemory, StreamT, TorchCuda
from raymoe.device.find_gpu import has_nvidia_gpu, why_no_gpu
from raymoe.device.host import read_host
from raymoe.device.threads import set_num_threads, torch_on_all_cores
from raymoe.doctor.examine import Check, Outcome, Status, Target
from raymoe.doctor.machine import kib_of
from raymoe.kernels.triton_support import TENSOR_CORES_SINCE
from raymoe.measure.gpu import LinkCopies, make_copies, seconds_on_stream
from raymoe.measure.host import num_torch_threads
from raymoe.measure.profile import staging_job
from raymoe.measure.timing import measure_in_turns, measure_limits
from raymoe.memory.arena import HostArena
from raymoe.specs.hardware import preset_of_gpu
from raymoe.units import GB, GIB, KIB, MIB, format_bytes

SECONDS = 1.0
TOUCH_BYTES = 512 * MIB
PIN_BYTES = GIB
LINK_SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
LINK_SECONDS = 0.1  # per size, direction and kind of memory
PAGE = 64 * MIB  # about a page of weights
LOWEST_LINK = 0.8  # of the rate of the preset
MAX_FOREIGN = 0.05  # of GPU memory, used by other processes
LOWEST_HUGE = 0.5  # of a large arena on huge pages
ISA_ADVICE: Mapping[str, str] = {
    "scalar": "no AVX2: kernels are portable and several times slower",
    "avx2": "no AVX512: products of bfloat16 run as float32, several times slower",
    "avx512": "no AVX512-BF16 (Sapphire Rapids, Zen 4 or later): products run as float32",
}


def checks(target: Target) -> list[Check]:
    threads = target.num_threads or read_host().num_cores
    set_num_threads(threads, num_torch_threads(threads))
    found = [
        Check("instruction set", instruction_set),
        Check("cores and memory", partial(host_rates, threads)),
        Check("first touch", first_touch),
        Check("staging copy", staging_copy),
    ]
    if target.device == "cuda":
        found += [
            Check("GPU", gpu),
            Check("GPU memory", gpu_memory),
            Check("pinning", pinning),
            Check("link", link),
            Check("PCI Express", pci_express),
        ]
    elif torch.cuda.is_available():
        found.append(
            Check(
                "GPU",
                lambda: Outcome("not examined", Status.SKIPPED, "raymoe doctor --device cuda does"),
            )
        )
    else:
        found.append(Check("GPU", no_gpu))
    return found


def instruction_set() -> Outcome:
    isa = _native.active_isa()
    advice = ISA_ADVICE.get(isa, "")
    return Outcome(isa, Status.WARNING if advice else Status.OK, advice)


def host_rates(num_threads: int) -> Outcome:
    limits = measure_limits(num_threads, SECONDS)
    return Outcome(
        f"{num_threads} threads: {limits.flop_per_s / GB:.0f} GFLOP/s in bfloat16, "
        f"reading {limits.bytes_per_s / GB:.1f} GB/s"
    )


def first_touch() -> Outcome:
    """How fast new memory can be written, and whether it lies on huge pages."""
    before = _huge_bytes()
    memory = HostArena(TOUCH_BYTES).allocate(TOUCH_BYTES)
    with torch_on_all_cores():
        begin_s = time.perf_counter()
        memory.fill_(1)
        rate = TOUCH_BYTES / (time.perf_counter() - begin_s)
    share = (_huge_bytes() - before) / TOUCH_BYTES
    value = f"{rate / GB:.2f} GB/s, {100 * share:.0f} % on huge pages"
    if share >= LOWEST_HUGE:
        return Outcome(value)
    advice = (
        "the kernel gives no huge pages: allow them (row 'huge pages'), or free memory that is "
        "fragmented: echo 1 > /proc/sys/vm/compact_memory"
    )
    return Outcome(value, Status.WARNING, advice)


def _huge_bytes(root: Path = Path("/")) -> int:
    path = root / "proc/self/smaps_rollup"
    return kib_of("AnonHugePages", path.read_text()) if path.exists() else 0


def staging_copy() -> Outcome:
    job = staging_job()
    (seconds,) = measure_in_turns([job], SECONDS / 2)
    return Outcome(f"{job.bytes_per_call / seconds / GB:.1f} GB/s, for weights that are not pinned")


def no_gpu(root: Path = Path("/")) -> Outcome:
    if not has_nvidia_gpu(root):
        return Outcome("none", Status.SKIPPED)
    return Outcome(
        "there is an NVIDIA GPU or its driver, but torch sees none", Status.FAILED, why_no_gpu(root)
    )


def gpu() -> Outcome:
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    value = f"{name}, capability {'.'.join(map(str, capability))}, CUDA {torch.version.cuda}"
    if capability < TENSOR_CORES_SINCE:
        advice = "no products of bfloat16: dtype='auto' computes in float16 here"
        return Outcome(value, Status.WARNING, advice)
    return Outcome(value)


def gpu_memory() -> Outcome:
    torch.zeros(1, device="cuda")  # makes the context, which needs memory too
    free, total = torch.cuda.mem_get_info()
    value = f"{format_bytes(free)} of {format_bytes(total)} free after the context of CUDA"
    foreign = total - free - torch.cuda.memory_reserved()
    if foreign > MAX_FOREIGN * total:
        advice = f"{format_bytes(foreign)} are taken: end other processes on the GPU (nvidia-smi)"
        return Outcome(value, Status.WARNING, advice)
    return Outcome(value)


def pinning() -> Outcome:
    """Whether an arena like that of the weights can be page-locked."""
    num_bytes = min(PIN_BYTES, read_host().available_memory_bytes // 4)
    memory = HostArena(num_bytes).allocate(num_bytes)
    memory.fill_(1)
    pinned = PinnedMemory(memory, TorchCuda())
    reason = pinned.register()
    if reason is not None:
        advice = (
            "weights go through a staging ring at half the rate of the link or less: free "
            "host memory, or give the container more"
        )
        return Outcome(f"refused for {format_bytes(num_bytes)}: {reason}", Status.FAILED, advice)
    pinned.close()
    rate = num_bytes / pinned.seconds / GB
    return Outcome(f"{format_bytes(num_bytes)} at {rate:.1f} GB/s")


def link() -> Outcome:
    api = TorchCuda()
    with api.thread_context():
        rows = []
        for num_bytes in LINK_SIZES:
            copies = make_copies(api.device, num_bytes)
            api.wait_stream(torch.cuda.current_stream(api.device))
            rows.append((num_bytes, link_rates(api, copies)))
            del copies
        torch.cuda.empty_cache()
    preset = preset_of_gpu(torch.cuda.get_device_name())
    expected = None if preset is None else preset.htod_bytes_per_s
    return link_outcome(rows, expected)


def link_rates(api: CudaApi[StreamT, EventT], copies: LinkCopies) -> tuple[float, ...]:
    """Bytes per second: pinned to the device and back, then pageable to the device and back."""
    stream = api.new_stream()
    calls = (copies.htod, copies.dtoh, copies.pageable_htod, copies.pageable_dtoh)
    return tuple(
        copies.num_bytes / seconds_on_stream(api, stream, [call], LINK_SECONDS) for call in calls
    )


def link_outcome(rows: list[tuple[int, tuple[float, ...]]], expected: float | None) -> Outcome:
    """Rates by size; `expected` is what this card usually reaches with pinned pages."""
    value = "to GPU / back, pinned (pageable), GB/s: " + "; ".join(_link_rows(rows))
    reached = dict(rows)[PAGE][0]
    if expected is not None and reached < LOWEST_LINK * expected:
        advice = (
            f"{reached / GB:.1f} GB/s with pages of {format_bytes(PAGE)}, where this card usually "
            f"has {expected / GB:.1f}: look at the row PCI Express, at other traffic, and whether "
            "the process runs on the socket of the GPU; weights stream at this rate"
        )
        return Outcome(value, Status.WARNING, advice)
    return Outcome(value)


def _link_rows(rows: list[tuple[int, tuple[float, ...]]]) -> Iterator[str]:
    for num_bytes, rates in rows:
        htod, dtoh, pageable_htod, pageable_dtoh = (rate / GB for rate in rates)
        yield (
            f"{format_bytes(num_bytes)} {htod:.1f} / {dtoh:.1f} "
            f"({pageable_htod:.1f} / {pageable_dtoh:.1f})"
        )


def pci_express() -> Outcome:
    return pci_outcome(Path("/sys/bus/pci/devices") / (TorchCuda().pci_address or "unknown"))


def pci_outcome(directory: Path) -> Outcome:
    """Width and generation in sysfs; the speed may drop while the GPU is idle, the width not."""
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    paths = [directory / name for name in names]
    if not all(path.exists() for path in paths):
        return Outcome("not known here", Status.SKIPPED)
    speed, width, max_speed, max_width = (path.read_text().strip() for path in paths)
    value = f"{speed} x{width}; at most {max_speed} x{max_width}"
    if width.isdigit() and max_width.isdigit() and int(width) < int(max_width):
        advice = (
            "the GPU has fewer lanes than it could: another slot, or a riser, a virtual machine"
        )
        return Outcome(value, Status.WARNING, advice)
    return Outcome(value)
