"""Identify this machine, measure it and store the measurements.

Assumes that proc is mounted and that the NVIDIA driver writes its version to
/proc/driver/nvidia/version.
"""

import dataclasses
import logging
import time
from functools import partial
from pathlib import Path

import torch

from raymoe.device.host import read_host
from raymoe.device.threads import probe_host, set_num_threads
from raymoe.measure.gpu import measure_device
from raymoe.measure.host import measure_host_curves, num_torch_threads
from raymoe.measure.kept import identify_machine, load_profile, store_profile
from raymoe.measure.others import CoreWatch
from raymoe.measure.plausible import find_problems
from raymoe.measure.timing import KernelJob, measure_in_turns
from raymoe.plan.policy import PAGE_BYTES
from raymoe.specs.hardware import USABLE_FRACTION, HardwareSpec

USUAL_SECONDS = 55.0  # a minute including start-up
PROBE_SHARE, COPY_SHARE, DEVICE_SHARE = 0.1, 0.05, 0.35
NUM_PAGES, RING_PAGES = 8, 2


def measure_machine(num_threads: int | None = None, seconds: float = USUAL_SECONDS) -> HardwareSpec:
    """Measure this machine and its first GPU, in `seconds` unless single calls take longer."""
    end_s = time.perf_counter() + seconds
    host = probe_host(num_threads=num_threads, seconds=PROBE_SHARE * seconds)
    set_num_threads(host.num_cores, num_torch_threads(host.num_cores))
    (copy_s,) = measure_in_turns([staging_job()], COPY_SHARE * seconds)
    has_gpu = torch.cuda.is_available()
    left_s = end_s - time.perf_counter() - DEVICE_SHARE * seconds * has_gpu
    host = dataclasses.replace(
        host,
        host_memory_bytes=int(USABLE_FRACTION * read_host().total_memory_bytes),
        host_copy_bytes_per_s=PAGE_BYTES / copy_s,
        host_curves=measure_host_curves(host, left_s),
    )
    return measure_device(host, max(0.0, end_s - time.perf_counter())) if has_gpu else host


logger = logging.getLogger(__name__)


def obtain_profile(
    directory: Path,
    num_threads: int | None = None,
    *,
    seconds: float = USUAL_SECONDS,
    is_fresh: bool = False,
) -> tuple[HardwareSpec, Path | None]:
    """The stored profile of this machine and its file; measures first if there is none.

    The file is None if the profile is not stored: it cannot be written, or its rates cannot be
    true, because other programs ran meanwhile. A warning says which.
    """
    machine = identify_machine(num_threads)
    kept = None if is_fresh else load_profile(directory, machine)
    if kept is not None and not find_problems(kept):
        return kept, directory / machine.file_name
    watch = CoreWatch()
    hardware = measure_machine(num_threads, seconds)
    others, problems = watch.read(), find_problems(hardware)
    if others.crowds(hardware.num_cores):
        logger.warning("%s, so its rates are too low: measure when nothing else runs", others)
    if problems:
        logger.warning(
            "the profile is not kept, as an idle machine has no such rates: %s", "; ".join(problems)
        )
        return hardware, None
    try:
        return hardware, store_profile(directory, machine, hardware)
    except OSError as error:
        logger.warning(
            "the profile is not kept: %s; set RAYMOE_CACHE to a directory that can be written",
            error,
        )
        return hardware, None


def staging_job() -> KernelJob:
    """Copies of weight pages into a ring, as from pageable to pinned memory."""
    pages = torch.ones(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8)
    ring = torch.zeros(RING_PAGES, PAGE_BYTES, dtype=torch.uint8)
    return KernelJob(
        kernel="staging copy",
        case=f"{NUM_PAGES} pages",
        calls=[partial(ring[i % RING_PAGES].copy_, pages[i]) for i in range(NUM_PAGES)],
        bytes_per_call=PAGE_BYTES,
        flop_per_call=0.0,
    )
