"""Who holds a lease: a process, and whether it has ended, as far as this machine can tell."""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A run that holds a lease; `beat` grows while it lives."""

    run: str
    host: str
    pid: int
    process_start: str
    began: str
    beat: int = 0

    @classmethod
    def here(cls, run: str) -> "Holder":
        """Return this process as the holder."""
        return cls(
            run=run,
            host=_host(),
            pid=os.getpid(),
            process_start=_process_start(os.getpid()),
            began=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )

    @property
    def has_ended(self) -> bool:
        """Whether it was a process of this machine that is gone."""
        return self.host == _host() and _process_start(self.pid) != self.process_start

    def __str__(self) -> str:
        return f"run {self.run} of process {self.pid} on {self.host}, since {self.began},"


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}".strip()


def _process_start(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rsplit(")", 1)[1].split()[19]
