"""Tensor parallelism over the GPUs of one node: what ranks add up, their processes and messages."""

import contextlib
import json
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor
from torch import distributed as dist

from raymoe.condition import Condition
from raymoe.device.lane import call_all
from raymoe.device.threads import set_num_threads
from raymoe.engine.core import Runner
from raymoe.engine.rank_model import LoadJob, RankModel, load_runner, open_weights, read_model
from raymoe.errors import ExecutionError
from raymoe.runtime.batch import InputBatch
from raymoe.schedule.timeline import Timeline

# ruff: noqa: SLF001 - torch has these options under no other names


LOOPBACK = "127.0.0.1"  # ranks are on one node; nobody else can connect
JOIN_LIMIT_S = 120.0


class PeerError(ExecutionError):
    """Another rank is gone, or timed out."""


class _Sum(Protocol):
    def wait(self) -> bool: ...


class _Group(Protocol):
    def allreduce(self, tensors: list[Tensor]) -> _Sum: ...

    def abort(self) -> None: ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...


class RankGroup:
    """The ranks of a node, each a process."""

    def __init__(
        self, meeting_place: Path, rank: int, count: int, *, device: torch.device, timeout_s: float
    ) -> None:
        """Meet the other ranks; return when all are there.

        Args:
            meeting_place: A file that does not exist yet, in a directory that all ranks see.
            device: Device of the tensors; NCCL on a GPU, Gloo on the host.
            timeout_s: Longest wait for the others in one all-reduce.

        Raises:
            PeerError: Not all came in time.
            ExecutionError: The first sum is wrong.
        """
        self.rank, self.count = rank, count
        self._is_on_gpu = device.type == "cuda"
        store = dist.FileStore(str(meeting_place), count)  # type: ignore[attr-defined]
        try:
            self._group = _open(store, rank, count, device)
        except RuntimeError as error:
            raise PeerError(f"rank {rank} did not find the other ranks: {error}") from error
        met = self.all_reduce(torch.ones(1, device=device)).item()
        if met != count:
            raise ExecutionError(f"rank {rank} of {count} added up {met} ranks")
        self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, with the same bits on each.

        Both libraries compute each element in one place or in one order. On a GPU the current
        stream waits, not the caller.

        Raises:
            PeerError: Another rank is gone, or timed out.
        """
        if tensor.numel():  # a micro-batch may be empty, then on all ranks
            try:
                self._group.allreduce([tensor]).wait()
            except RuntimeError as error:
                raise PeerError(f"rank {self.rank} waited in vain for another: {error}") from error
        return tensor

    def abort(self) -> None:
        """Fail an all-reduce that waits for a rank that is gone; callable from any thread.

        Gloo notices the end of a process itself.
        """
        if self._is_on_gpu:
            self._group.abort()


def _open(store: object, rank: int, count: int, device: torch.device) -> _Group:
    limit = timedelta(seconds=JOIN_LIMIT_S)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        return cast("_Group", dist.ProcessGroupNCCL(store, rank, count, nccl))  # type: ignore[arg-type]
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    gloo._timeout = limit
    return cast("_Group", dist.ProcessGroupGloo(store, rank, count, gloo))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    rank: int
    meeting_place: Path
    job: LoadJob


@dataclass(frozen=True, slots=True)
class Reached:
    """A rank has reached a stage: "imported", then "loaded"."""

    stage: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank has failed; `is_consequence` says whether because another rank has ended."""

    error: str
    is_consequence: bool


def send(connection: Connection, message: object) -> None:
    """Send a message. torch's own pickling of connections would share memory by descriptors."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> object:
    return pickle.loads(connection.recv_bytes())  # only from this process or its child


MAX_ERROR_CHARACTERS = 4000


def main(descriptor: int) -> None:
    """Serve rank 0 through the pipe with this descriptor."""
    connection = Connection(descriptor)
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(connection, inbox), daemon=True)
    listener.start()
    try:
        _serve(connection, inbox)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        send(connection, Failed(text[:MAX_ERROR_CHARACTERS], _is_consequence(error)))
        sys.exit(1)


def _is_consequence(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, PeerError):
        error = error.__cause__
    return error is not None


def _listen(connection: Connection, inbox: "queue.SimpleQueue[object]") -> None:
    try:
        while True:
            inbox.put(receive(connection))
    except (EOFError, OSError):
        os._exit(0)  # the engine is closed, or gone


def _serve(connection: Connection, inbox: "queue.SimpleQueue[object]") -> None:
    begin = inbox.get()
    assert isinstance(begin, Begin)
    job, rank = begin.job, begin.rank
    send(connection, Reached("imported"))
    device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for code that asks for the current device
    group = RankGroup(
        begin.meeting_place,
        rank,
        job.num_ranks,
        device=device,
        timeout_s=job.step_limit_s,
    )
    set_num_threads(job.hardware.num_cores, job.num_torch_threads)
    model = read_model(job.directory, job.config)
    weights = open_weights(model, job.directory, job.config)
    share = RankModel.of(job, model, weights, rank=rank)
    runner = load_runner(replace(share, reduce=group.all_reduce))
    send(connection, Reached("loaded"))
    while True:
        message = inbox.get()
        assert isinstance(message, InputBatch)
        with runner.run(message):
            pass  # rank 0 alone has logits


STAGES = ("started", "imported", "loaded")
IMPORT_LIMIT_S = 300.0  # importing torch takes long on a busy machine
NOTICE_S = 5.0  # how long a failed step waits for news of the rank that failed
END_S = 5.0  # how long a rank may take to exit
# Like multiprocessing's "spawn", but does not run the user's script again.
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); \
from raymoe.engine.ranks import main; main(int(sys.argv[2]))"


class RankProcess:
    """One rank: its process, the pipe to it, and a thread that receives its messages.

    Args:
        on_change: Called, in that thread, whenever `stage` or `failure` has changed.

    Attributes:
        stage: Latest of `STAGES` that it has reached.
        failure: Why it has ended or will; empty while it works.
        is_consequence: Whether it ended because another rank did.
    """

    def __init__(self, begin: Begin, on_change: Callable[[], None]) -> None:
        self.rank, self.stage = begin.rank, STAGES[0]
        self.failure, self.is_consequence = "", False
        self._on_change, self._is_closing = on_change, False
        self._process, self._connection = _start()
        self._thread = threading.Thread(
            target=self._listen, name=f"raymoe-rank-{begin.rank}", daemon=True
        )
        self._thread.start()
        self.send(begin)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self._process.pid})"

    def send(self, message: Begin | InputBatch) -> None:
        """Send a message; if the rank is gone, `failure` will say so."""
        with contextlib.suppress(OSError):
            send(self._connection, message)

    def kill(self) -> None:
        self.failure = self.failure or f"{self.name} was ended"
        self._process.kill()

    def close(self) -> None:
        """End the process, and close the pipe and thread to it."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            # Unlike `close`, this wakes the receiving thread; the process sees its pipe end.
            _shut_down(self._connection)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                message = receive(self._connection)
                if isinstance(message, Reached):
                    self.stage = message.stage
                elif isinstance(message, Failed):
                    self.is_consequence = message.is_consequence
                    self.failure = f"{self.name} failed: {message.error}"
                self._on_change()
        except (EOFError, OSError):
            if self._is_closing:
                return
        self.failure = self.failure or f"{self.name} ended: {self._describe_end()}"
        self._on_change()

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        hint = "; was the host out of memory?" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"


class Ranks:
    """The ranks other than this process, and the group of all ranks."""

    def __init__(self, job: LoadJob) -> None:
        self._changed = Condition()
        self._group: RankGroup | None = None
        self._processes: list[RankProcess] = []
        # Not a `TemporaryDirectory`: every process forked from this one would remove it at exit.
        self._directory = Path(tempfile.mkdtemp(prefix="raymoe-ranks-"))
        meeting_place = self._directory / "store"
        try:
            for rank in range(1, job.num_ranks):
                begin = Begin(rank=rank, meeting_place=meeting_place, job=job)
                self._processes.append(RankProcess(begin, self._notice))
            self.wait_for("imported", IMPORT_LIMIT_S)
            device = torch.device("cuda", 0) if job.device == "cuda" else torch.device("cpu")
            self._group = RankGroup(
                meeting_place, 0, job.num_ranks, device=device, timeout_s=job.step_limit_s
            )
        except BaseException as error:
            failure = self.failure
            self.close()
            if failure:  # an incomplete group does not know why
                raise ExecutionError(failure) from error
            raise
        self.all_reduce = self._group.all_reduce

    @property
    def failure(self) -> str:
        """Why a rank is gone; empty while all are there.

        If several are gone, the root cause is preferred once it is known.
        """
        with self._changed:
            self._changed.wait_for(self._is_explained, NOTICE_S)
            gone = [rank for rank in self._processes if rank.failure]
            return min(gone, key=lambda rank: rank.is_consequence).failure if gone else ""

    def _is_explained(self) -> bool:
        gone = [rank for rank in self._processes if rank.failure]
        return not gone or not all(rank.is_consequence for rank in gone)

    def wait_for(self, stage: str, limit_s: float | None = None) -> None:
        """Wait until all ranks have reached a stage; raise `ExecutionError` if one does not."""
        minimum = STAGES.index(stage)

        def behind() -> list[RankProcess]:
            return [rank for rank in self._processes if STAGES.index(rank.stage) < minimum]

        with self._changed:
            self._changed.wait_for(lambda: self._has_failed() or not behind(), limit_s)
            self._check()
            if behind():
                names = ", ".join(rank.name for rank in behind())
                raise ExecutionError(f"{names} not {stage} after {limit_s:g} s")

    def send(self, batch: InputBatch) -> None:
        self._check()
        for rank in self._processes:
            rank.send(batch)

    def explain(self, error: Exception) -> Exception:
        """Return what happened to a rank, if it caused this error of a step, else the error."""
        with self._changed:
            self._changed.wait_for(self._has_failed, NOTICE_S)
        failure = self.failure
        return ExecutionError(failure) if failure else error

    def interrupt(self) -> None:
        """Kill the ranks, so that an all-reduce with them fails; callable from any thread."""
        for rank in self._processes:
            rank.kill()
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        for rank in self._processes:
            rank.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _has_failed(self) -> bool:
        return any(rank.failure for rank in self._processes)

    def _check(self) -> None:
        if self._has_failed():
            raise ExecutionError(self.failure)

    def _notice(self) -> None:
        with self._changed:
            self._changed.notify_all()
        if self._has_failed() and self._group is not None:
            self._group.abort()


class RankedRunner:
    """Runs each step on all ranks; `own` runs the share of this one."""

    def __init__(self, own: Runner, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    @property
    def last_timeline(self) -> Timeline:
        """What was measured here."""
        return self._own.last_timeline

    @contextlib.contextmanager
    def run(self, batch: InputBatch) -> Iterator[Tensor]:
        """Run one step; its hidden rows are the same on all ranks.

        Raises:
            ExecutionError: A task failed, or a rank; names it.
        """
        self._ranks.send(batch)
        try:
            with self._own.run(batch) as hidden_RH:
                yield hidden_RH
        except Exception as error:
            raise self._ranks.explain(error) from error

    def compute_logits(self, hidden_RH: Tensor) -> Tensor:
        """Compute logits here: every rank has the whole head."""
        return self._own.compute_logits(hidden_RH)

    def interrupt(self) -> None:
        """Let a step that waits for other ranks fail."""
        self._ranks.interrupt()

    def close(self) -> None:
        """End the other ranks, then release what this one has."""
        call_all([self._ranks.close, self._own.close])


def load_ranks(own: RankModel) -> RankedRunner:
    """Load all ranks at once, the first one, `own`, in this process."""
    ranks = Ranks(own.job)
    try:
        runner = load_runner(replace(own, reduce=ranks.all_reduce))
        ranks.wait_for("loaded")
    except BaseException:
        ranks.close()
        raise
    return RankedRunner(runner, ranks)


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process in its own session, which terminal interrupts do not reach, and a pipe."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = theirs.fileno()
        # -P: a script's folder must not precede the standard library.
        command = [sys.executable, "-P", "-c", START, json.dumps(sys.path), str(number)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(number,), start_new_session=True
        )
        return process, Connection(ours.detach())


def _shut_down(connection: Connection) -> None:
    pipe = socket.socket(fileno=connection.fileno())
    try:
        pipe.shutdown(socket.SHUT_RDWR)
    finally:
        pipe.detach()
