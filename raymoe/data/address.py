"""Where `ray.init` would look for a cluster, and whether one answers there."""

import logging
import os
import socket
import threading
import time
from pathlib import Path

from ray._private.utils import get_ray_address_file

from raymoe.errors import ConfigError

# `ray.init` waits for minutes, or forever, where no cluster answers. A head that starts needs some.
ANSWER_S, RETRY_EVERY_S = 10.0, 0.5

logger = logging.getLogger(__name__)

_OF_VARIABLE = "start that cluster, correct RAY_ADDRESS, or unset it to start a Ray on this machine"
_OF_FILE = (
    "it is left of a Ray that has ended: remove the file, or set RAY_ADDRESS=local to start a Ray "
    "on this machine"
)


def check_address(timeout_s: float = ANSWER_S) -> None:
    """Refuse the address that `ray.init` would take if no cluster answers there.

    Args:
        timeout_s: How long a connection may take, and then an answer.

    Raises:
        ConfigError: It is that of no cluster; says where it is from and what to do.
    """
    given = os.environ.get("RAY_ADDRESS", "")  # noqa: TID251 - Ray's own
    file = Path(get_ray_address_file(None))
    if given == "local":
        return
    if given not in {"", "auto"}:
        _check(given, f"RAY_ADDRESS is {given}", _OF_VARIABLE, timeout_s)
    elif file.is_file():
        address = file.read_text().strip()
        _check(address, f"{file} has the address {address}", _OF_FILE, timeout_s)


def _check(address: str, source: str, advice: str, timeout_s: float) -> None:
    kind, separator, place = address.rpartition("://")
    if kind in {"http", "https"}:
        raise ConfigError(
            f"{source}, which is for `ray job submit`; a cluster is HOST:6379 on its nodes and "
            f"ray://HOST:10001 elsewhere: {advice}"
        )
    host, _, port = place.partition("?")[0].rstrip("/").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{source}, which is no HOST:PORT; {advice}")
    problem = _connect(host.strip("[]"), int(port), timeout_s)
    if not problem and not separator:
        problem = _ask(place, timeout_s)
    if problem:
        raise ConfigError(f"{source}, but no Ray cluster answers there ({problem}): {advice}")


def _connect(host: str, port: int, timeout_s: float) -> str:
    """Try until something listens; return why nothing does, "" if it does."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            socket.create_connection((host, port), max(0.1, left_s)).close()
        except (OSError, OverflowError) as error:
            if time.monotonic() + RETRY_EVERY_S >= deadline_s:
                return str(error) or type(error).__name__
        else:
            return ""
        time.sleep(RETRY_EVERY_S)


def _ask(address: str, timeout_s: float) -> str:
    """Ask the control service of a cluster for its id; return "" for any answer, a refusal too.

    A listener of another kind, or a stopped one, keeps the asking thread forever.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # noqa: PLC0415 - takes a second

    has_answered = threading.Event()

    def ask() -> None:
        try:
            _ = GcsClient(address=address).cluster_id
        except Exception:  # such as a missing token: `ray.init` says that better
            logger.info("%s", address, exc_info=True)
        has_answered.set()

    threading.Thread(target=ask, name="raymoe-address", daemon=True).start()
    return "" if has_answered.wait(timeout_s) else f"nothing in {timeout_s:g} s"
