"""Is the memory of a plan there? Asked before anything is taken: later, the kernel would kill."""

import logging
import time

from raymoe.device.host import read_host, rss_bytes
from raymoe.plan.policy import Footprint
from raymoe.units import format_bytes

# An actor that is restarted begins while the kernel still takes back hundreds of gigabytes from the
# process before it.
PATIENCE_S, LOOK_EVERY_S = 30.0, 0.5

logger = logging.getLogger(__name__)


def check_available(
    footprint: Footprint, *, what: str, num_ranks: int = 1, already_there: int = 0
) -> None:
    """Wait a little until so much memory is free, and refuse a plan for which it never is.

    A budget that is given (`host_memory_bytes`, a `HardwareSpec`) may exceed what the machine or
    the control groups of this process have left.

    Args:
        footprint: Host memory of the plan, which is that of one rank.
        what: What needs it, for the message.
        num_ranks: Ranks that take as much each.
        already_there: Bytes of it that exist already, such as weights that others have loaded.

    Raises:
        InfeasiblePlanError: With the table and the bytes missing.
    """
    end_s = time.monotonic() + PATIENCE_S
    is_waiting = False
    while True:
        # What this process has taken so far is part of the plan's "runtime".
        free = read_host().available_memory_bytes + rss_bytes() + already_there
        available = free // num_ranks
        if footprint.total <= available:
            return
        if time.monotonic() >= end_s:
            break
        if not is_waiting:
            is_waiting = True
            logger.info(
                "%s needs %s of host memory, %s are free; waiting for more",
                what,
                format_bytes(footprint.total),
                format_bytes(available),
            )
        time.sleep(LOOK_EVERY_S)
    footprint.check_fits(
        available,
        what=what,
        advice="So much is free now, by /proc/meminfo and the control groups of this process. "
        "Reduce host_memory_bytes, end what else runs on the node, or choose one with more memory.",
    )
