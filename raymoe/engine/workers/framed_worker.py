"""The script of every helper process: answers framed requests within limits of CPU time and memory.

Run as `python -P framed_worker.py ROLE`. The file ROLE has `start(settings, blob)`, which returns
facts for the parent and a function that answers a request. Neither imports raymoe, so that it does
not matter where the parent found it.

Protocol, over the socket that is standard input: frames of a header, JSON and raw bytes. The first
holds the settings and is answered by the facts; each later one is a request with its own answer. An
answer {"error": ...} says what went wrong. The kernel ends this process by SIGPROF when a request
uses more CPU time than its header allows, in native code too.
"""

import json
import mmap
import resource
import runpy
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

HEADER = struct.Struct("<dQQ")  # CPU seconds, bytes of JSON, raw bytes
MAX_ERROR_CHARACTERS = 1000
Message = dict[str, Any]
Frame = tuple[Message, bytes]
Answer = Callable[[Message, bytes], Frame]


def pack(message: Message, blob: bytes = b"", cpu_s: float = 0.0) -> bytes:
    text = json.dumps(message).encode()
    return HEADER.pack(cpu_s, len(text), len(blob)) + text + blob


def describe(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "needs more memory than it may have"
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]


def _read(stream: BinaryIO) -> tuple[float, Frame] | None:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    cpu_s, num_json_bytes, num_blob_bytes = HEADER.unpack(header)
    message = json.loads(stream.read(num_json_bytes))
    return cpu_s, (message, stream.read(num_blob_bytes))


def _limit_memory(num_bytes: int) -> None:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - pathlib is not needed here
        limit = int(file.read().split()[0]) * mmap.PAGESIZE + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(role: str) -> None:
    connection = socket.socket(fileno=sys.stdin.fileno())
    stream = connection.makefile("rb")
    answer: Answer | None = None
    result: Frame
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (frame := _read(stream)) is not None:
        cpu_s, (message, blob) = frame
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            if answer is None:
                start = runpy.run_path(role)["start"]
                _limit_memory(message.pop("memory_bytes"))
                result, answer = start(message, blob)
            else:
                result = answer(message, blob)
        except BaseException as error:  # a panic of a Rust library is no Exception
            result = {"error": describe(error)}, b""
        data = pack(*result)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        connection.sendall(data)


if __name__ == "__main__":
    main(sys.argv[1])
