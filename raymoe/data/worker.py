"""Where do we run? What an operator may do to its process when its engine is broken."""

import sys


def should_leave_process(*, has_finished_a_batch: bool) -> bool:
    """Say whether ending this process is the way to get a new engine.

    True inside a Ray actor: Ray starts a new one and sends it the same batches, while an ordinary
    exception fails the job. False elsewhere, and for an actor that was already restarted and broke
    again before it finished anything: the cause is permanent.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    return has_finished_a_batch or not context.was_current_actor_reconstructed
