"""A measurement of this machine in a second, for engines that have no profile of it."""

import dataclasses
import logging
import time

from raymoe.device.threads import probe_host
from raymoe.measure.host import NarrowModel
from raymoe.measure.others import CoreWatch
from raymoe.measure.plausible import find_problems
from raymoe.specs.hardware import HardwareSpec

# Other programs come and go, a compiler for minutes: short probes one after the other, of which the
# best counts, and more of them with pauses between while others take the cores.
NUM_PROBES, MAX_PROBES, LIMIT_S = 3, 8, 3.0
PROBE_S, STEPS_S = 0.1, 0.07
PAUSE_S = 0.1  # a scheduler lets those run first who have slept

logger = logging.getLogger(__name__)


def measure_quickly(num_threads: int | None = None) -> HardwareSpec:
    """Return the best rates of several probes; a warning says what disturbed all of them.

    Args:
        num_threads: Of the kernels; None takes all cores.
    """
    watch, end_s = CoreWatch(), time.perf_counter() + LIMIT_S
    probes: list[HardwareSpec] = []
    steps, is_clear = None, False  # whether a probe had the cores
    while True:
        watch.begin()
        probes.append(probe_host(num_threads=num_threads, seconds=PROBE_S))
        num_cores = probes[-1].num_cores
        steps = steps or NarrowModel(num_cores)
        if len(probes) <= NUM_PROBES:
            steps.run(STEPS_S)
        others = watch.read()
        is_crowded = others.crowds(num_cores)
        is_clear = is_clear or not is_crowded
        has_time = len(probes) < MAX_PROBES and time.perf_counter() < end_s
        if len(probes) >= NUM_PROBES and (is_clear or not has_time):
            break
        if is_crowded:
            time.sleep(PAUSE_S)
    best = dataclasses.replace(
        probes[-1],
        host_bytes_per_s=max(each.host_bytes_per_s for each in probes),
        host_flop_per_s=max(each.host_flop_per_s for each in probes),
    )
    measured = dataclasses.replace(best, task_overhead_s=steps.overhead(best))
    problems = find_problems(measured)
    if problems:
        measured = dataclasses.replace(measured, task_overhead_s=None)
    if problems or not is_clear:
        logger.warning(
            "%s, so a plan with its rates may predict too long a time; run 'raymoe profile' once "
            "while nothing else runs, and its rates are used instead", others,
        )  # fmt: skip
    return measured
