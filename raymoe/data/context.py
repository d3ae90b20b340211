"""configure_data_context: what of Ray Data's settings an operator cannot set for itself."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from raymoe.errors import ConfigError

if TYPE_CHECKING:
    from ray.data import DataContext

NO_PROGRESS_TIMEOUT_S = 6 * 3600  # one slow wave or a large load moves no block


def configure_data_context(
    *,
    id_column: str | None = None,
    checkpoint_path: str | Path | None = None,
    preserve_order: bool = False,
    no_progress_timeout_s: float = NO_PROGRESS_TIMEOUT_S,
    context: "DataContext | None" = None,
) -> "DataContext":
    """Set Ray Data up for long passes; call it before the dataset is made.

    Without it Ray Data ends a job in which no block moved for half an hour, as happens while large
    weights load or few long rows are left; and each of the hundreds of tasks inside of an actor has
    a thread that reads the memory of their common process every second.

    With a checkpoint path, Ray Data notes the ids of every file it has written there, and a job
    that is started again skips those rows. The dataset must come from files, go through maps alone
    and be written to files; ids must be unique and kept up to the end. Reading them back takes an
    actor with one CPU and 1 GiB of `memory` beside those of the job.

    Args:
        id_column: Of the rows; needed for a checkpoint.
        checkpoint_path: A directory that all nodes reach, or an address of object storage.
        preserve_order: Rows come out in the order of the input; the rows of a node that dies then
            hold up all that follow them.
        no_progress_timeout_s: Longest time without a block that moves; `math.inf` for no limit.
        context: That of this process by default.

    Raises:
        ConfigError: A checkpoint without a column of ids, or a limit that is not positive.
    """
    # Ray is slow to import, and planning needs none of it.
    from ray.data import DataContext  # noqa: PLC0415
    from ray.data.checkpoint import CheckpointConfig  # noqa: PLC0415

    if not no_progress_timeout_s > 0:
        raise ConfigError(
            f"no_progress_timeout_s is {no_progress_timeout_s!r}; it must be positive, or math.inf"
        )
    if checkpoint_path is not None and id_column is None:
        raise ConfigError(
            f"checkpoint_path is {str(checkpoint_path)!r}, but id_column is missing: a checkpoint "
            "knows rows by their ids"
        )
    context = context or DataContext.get_current()
    never = -1
    context.execution_no_progress_timeout_s = (
        never if math.isinf(no_progress_timeout_s) else no_progress_timeout_s
    )
    context.execution_options.preserve_order = preserve_order
    context.memory_usage_poll_interval_s = None  # a thread for each task; their process is the same
    if checkpoint_path is not None:
        context.checkpoint_config = CheckpointConfig(
            id_column=id_column, checkpoint_path=str(checkpoint_path)
        )
    return context
