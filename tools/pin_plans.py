"""Print plans of random jobs, to the last digit: compare the output of two commits.

`python -m tools.pin_plans 200` prints a line for each of 200 jobs.
"""

import json
import sys

from raymoe.errors import InfeasiblePlanError
from tests.unit.plan.test_search_random import random_job


def planned(number: int) -> dict[str, object]:
    """What is decided and predicted for a job, not rounded."""
    job = random_job(number)
    found: dict[str, object] = {"model": job.model.name, "node": job.node.name}
    try:
        plan = job.plan()
    except InfeasiblePlanError:
        return found | {"schedule": "none"}
    policy, device = plan.policy, plan.policy.device
    found |= {
        "schedule": plan.schedule,
        "sequences": policy.max_num_seqs,
        "tokens": policy.max_num_batched_tokens,
        "kv_blocks": policy.num_kv_blocks,
        "host_bytes": plan.footprint.total,
        "seconds": plan.job.seconds,
    }
    if device is not None:
        found |= {
            "micro_batches": device.num_micro_batches,
            "cpu_attention": device.cpu_attention_fraction,
            "cpu_experts": device.cpu_experts_fraction,
        }
    if plan.device_footprint is not None:
        found["device_bytes"] = plan.device_footprint.total
    return found


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        print(json.dumps(planned(number)), flush=True)
