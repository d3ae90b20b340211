"""Where do we run? What an operator may do to its process when its engine is broken."""

import sys


def should_leave_process(*, is_restart_useful: bool) -> bool:
    """Say whether ending this process is the way to get a new engine.

    True inside a Ray actor: Ray starts a new one and sends it the same batches, while an ordinary
    exception fails the job. False elsewhere, and for an actor that was already restarted and broke
    again where another restart is of no use.

    Args:
        is_restart_useful: Whether the engine may go on if it breaks once more: it has generated
            something, or somebody else finds out why it breaks.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    return is_restart_useful or not context.was_current_actor_reconstructed
