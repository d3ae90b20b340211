"""Progress on standard error: what a load does, and how many rows of a call are done."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from raymoe.periodic import Periodic

if TYPE_CHECKING:
    from tqdm import tqdm

DELAY_S, EVERY_S = 1.0, 0.5  # what takes less shows nothing
ROWS_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows [{elapsed}<{remaining}{postfix}]"
STAGE_FORMAT = "{desc} [{elapsed}]"

logger = logging.getLogger(__name__)


class Tell(Protocol):
    """Takes what a load does now, and how many of its parts are done where they are counted."""

    def __call__(self, stage: str, num_done: int = 0, num_parts: int = 0) -> None: ...


def tell_log(stage: str, num_done: int = 0, num_parts: int = 0) -> None:
    """Write each stage to the log when it begins."""
    del num_parts
    if not num_done:
        logger.info("%s", stage)


def is_shown(use_tqdm: bool | None) -> bool:
    """Whether to show progress; None is yes on a terminal."""
    if use_tqdm is not None:
        return use_tqdm
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def shown_load(name: str, use_tqdm: bool | None) -> Iterator[Tell]:
    """Yield what a load tells its stages to; the line vanishes when the model is loaded."""
    if not is_shown(use_tqdm):
        yield tell_log
        return
    bar = _bar(desc=f"{name}: starting", bar_format=STAGE_FORMAT, leave=False)

    def tell(stage: str, num_done: int = 0, num_parts: int = 0) -> None:
        tell_log(stage, num_done, num_parts)
        count = f" {num_done}/{num_parts}" if num_parts else ""
        bar.set_description_str(f"{name}: {stage}{count}", refresh=False)

    with _updated(bar, lambda: None):
        yield tell


@contextmanager
def shown_rows(
    num_rows: int,
    *,
    num_done: Callable[[], int],
    num_tokens: Callable[[], int],
    unit: str,
    use_tqdm: bool | None,
) -> Iterator[None]:
    """Show how many rows are done, what is left, and tokens per second since the beginning.

    Args:
        num_tokens: Of all rows in the engine, since it was loaded.
        unit: Of the rate.
    """
    if not is_shown(use_tqdm):
        yield
        return
    bar = _bar(total=num_rows, bar_format=ROWS_FORMAT, smoothing=0)
    begin_s, begin_tokens = time.monotonic(), num_tokens()

    def update() -> None:
        rate = (num_tokens() - begin_tokens) / max(time.monotonic() - begin_s, EVERY_S)
        bar.set_postfix_str(f"{rate:,.0f} {unit}", refresh=False)
        bar.n = num_done()

    with _updated(bar, update):
        yield


def _bar(**options: object) -> "tqdm[None]":
    from tqdm.auto import tqdm  # noqa: PLC0415 - most engines show nothing

    return tqdm(miniters=0, mininterval=0, delay=DELAY_S, file=sys.stderr, **options)


@contextmanager
def _updated(bar: "tqdm[None]", update: Callable[[], None]) -> Iterator[None]:
    def show() -> None:
        update()
        bar.update(0)

    thread = Periodic(show, EVERY_S, name="raymoe-progress")
    try:
        yield
    finally:
        thread.close()
        bar.close()
