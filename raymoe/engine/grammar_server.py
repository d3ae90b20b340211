"""Our end of the processes in `grammar_worker`: started when needed, ended with the engine."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from raymoe.errors import ConfigError, ExecutionError

WORKER = Path(__file__).with_name("grammar_worker.py")
START_LIMIT_S = 300.0  # importing torch takes long where everything else is busy


def check_present() -> None:
    """Refuse structured outputs where the library for them is missing.

    Raises:
        ConfigError: Says how to install it.
    """
    if importlib.util.find_spec("xgrammar") is None:
        raise ConfigError("structured_outputs needs xgrammar: pip install 'xgrammar>=0.2.8,<0.3'")


class GrammarServer:
    """Forks processes that know the vocabulary; the first call starts it. Thread-safe.

    Args:
        directory: Of the tokenizer.
        vocab_size: Of the model.
        stop_token_ids: Tokens that end a text.

    Attributes:
        vocab_size: Of the model.
    """

    def __init__(self, directory: Path, vocab_size: int, stop_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._vocabulary = {
            "directory": str(directory),
            "vocab_size": vocab_size,
            "stop_token_ids": list(stop_token_ids),
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def fork(self, role: bytes, *descriptors: int) -> Connection:
        """A pipe to a fresh process.

        Args:
            role: What it does, see `grammar_worker`.
            descriptors: Open files that it gets too.

        Raises:
            ExecutionError: The libraries or the vocabulary cannot be loaded.
        """
        with self._lock:
            control = self._running()
            ours, theirs = socket.socketpair()
            with ours, theirs:
                socket.send_fds(control, [role], [theirs.fileno(), *descriptors])
                return Connection(ours.detach())

    def close(self) -> None:
        """End all processes, also one that starts; a later `fork` fails."""
        self._is_closed = True
        self._kill(self._process)
        with self._lock:
            self._stop()

    def _running(self) -> socket.socket:
        if self._is_closed:
            raise ExecutionError("the engine is closed")
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._control is None:
            self._control = self._start()
        return self._control

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            # -P: the folder of the script must not come before the standard library.
            command = [sys.executable, "-P", str(WORKER), str(number), json.dumps(self._vocabulary)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(number,),
                process_group=0,
            )
        if self._is_closed:  # `close` came before there was a process to end
            self._stop()
        ours.settimeout(START_LIMIT_S)
        try:
            answer = ours.recv(4096)
            error = json.loads(answer)["error"] if answer else "its process ended"
        except TimeoutError:
            error = f"its process did not start in {START_LIMIT_S:g} s"
        ours.settimeout(None)
        if error:
            ours.close()
            self._stop()
            raise ExecutionError(f"structured_outputs cannot be used: {error}")
        return ours

    def _stop(self) -> None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        self._kill(process)

    @staticmethod
    def _kill(process: subprocess.Popen[bytes] | None) -> None:
        """End a process and its children, which are in its group."""
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
