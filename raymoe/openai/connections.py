"""Deadlines and limits of connections that uvicorn lacks: who waits for whom, and how long.

uvicorn closes connections that are idle after a response (`timeout_keep_alive`) and bounds the size
of headers. It waits without limit for headers, for bodies and for clients that do not read.
"""

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from raymoe.openai.store import ApiError

WELCOME = "raymoe.welcome"  # in the scope of a request: called once the request is accepted
MIN_BODY_BYTES = 16 << 10  # in `timeout_s`, while a body is awaited
MAX_REFUSED = 64  # connections that are being told that there are too many
HEAD, BODY, ANSWER, REST = "head", "body", "answer", "rest"
REASONS = {408: "Request Timeout", 503: "Service Unavailable"}


@dataclass(slots=True)
class ConnectionLimits:
    """The limits, and the connections that they count.

    Attributes:
        timeout_s: Until the headers of a request are complete, and between pieces of at least
            `MIN_BODY_BYTES` of its body, and between pieces that a client takes of a response.
        max_connections: Others are answered with 503.
        max_strangers: Connections without an accepted request; another one ends the oldest.
    """

    timeout_s: float = 30.0
    max_connections: int = 1024
    max_strangers: int = 128
    strangers: "OrderedDict[LimitedProtocol, None]" = field(default_factory=OrderedDict)


class LimitedProtocol(H11Protocol):
    """uvicorn's connection, within limits."""

    def __init__(self, limits: ConnectionLimits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits = limits
        self._num_bytes = self._num_requests = self._num_drains = 0
        self._seen: tuple[Any, ...] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits = self._limits
        self._look()
        if len(self.connections) > limits.max_connections + MAX_REFUSED:
            transport.abort()
            return
        if len(self.connections) > limits.max_connections:
            self._refuse(503, f"the server has {limits.max_connections} connections, which is its "
                         "limit; try again later")  # fmt: skip
            return
        limits.strangers[self] = None
        if len(limits.strangers) > limits.max_strangers:
            oldest, _ = limits.strangers.popitem(last=False)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.strangers.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_bytes += len(data)
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._num_requests += 1
            self.scope[WELCOME] = self._welcome  # type: ignore[literal-required]

    def resume_writing(self) -> None:
        self._num_drains += 1
        super().resume_writing()

    def _welcome(self) -> None:
        self._limits.strangers.pop(self, None)

    def _phase(self) -> str:
        """Return what the connection waits for."""
        if self._num_requests == 0 or self._is_refused:
            return HEAD
        if not self.cycle.response_complete:
            return BODY if self.cycle.more_body else ANSWER
        return REST if self.conn.their_state is h11.SEND_BODY else HEAD

    def _look(self) -> None:
        phase = self._phase()
        place = (phase, self._num_requests, self.transport.is_closing(), self._is_refused)
        progress = (self._num_bytes, self._num_drains, self.transport.get_write_buffer_size())
        if self._seen and self._seen[0] == place and self._is_stalled(phase, *self._seen[1:]):
            self._cut(phase)
            return
        self._seen = (place, *progress)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self._limits.timeout_s, self._look)

    def _is_stalled(self, phase: str, num_bytes: Any, num_drains: Any, waiting: Any) -> bool:
        if self.transport.is_closing() or phase == ANSWER:
            left = self.transport.get_write_buffer_size()
            return bool(left) and left >= waiting and num_drains == self._num_drains
        if phase == BODY:
            is_ours = self.flow.read_paused  # the client may not send
            return not is_ours and self._num_bytes < num_bytes + MIN_BODY_BYTES
        return True

    def _cut(self, phase: str) -> None:
        is_open = not (self.transport.is_closing() or self._is_refused)
        is_begun = self._num_bytes > self._seen[1]  # else it was idle, which is no mistake
        if is_open and phase == HEAD and is_begun and self.conn.our_state is h11.IDLE:
            self._refuse(408, f"the headers took longer than {self._limits.timeout_s:g} s")
        elif is_open and phase == BODY and not self.cycle.response_started:
            self._refuse(408, f"less than {MIN_BODY_BYTES} bytes of the body came in "
                         f"{self._limits.timeout_s:g} s")  # fmt: skip
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps(ApiError(status, message).as_plain())
        head = (
            f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        # What the client still sends is read and dropped: closed with data unread, a connection is
        # reset, and the client never sees the answer. The next look ends it.
        self._is_refused, self._seen = True, ()
        self._look()
        self.transport.write((head + body).encode("ascii"))
        self.transport.write_eof()
