"""Run the parts of the GPU suite in turn, in processes, each part with a time limit."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from queue import Empty, Queue
from types import FrameType

from raymoe.bench.gpu.node import measured_node
from raymoe.bench.gpu.part import log_of, result_of
from raymoe.bench.gpu.settings import (
    ACCELERATE,
    GPU_WORKLOADS,
    MAIN_CONTENDERS,
    NodeSettings,
    PartResult,
    PartSettings,
    Status,
    append_result,
    layers_that_fit,
    read_results,
)
from raymoe.config import Settings
from raymoe.errors import ExecutionError
from raymoe.specs.files import new_file, read_text
from raymoe.specs.hardware import HardwareSpec
from raymoe.units import format_seconds

Report = Callable[[str], None]

RESULTS = "gpu.jsonl"
# Share of a part's limit that the weights of all steps may take on the link. Schedules that wait
# for them take up to twice that.
LINK_SHARE = 0.35
SIGNALLED = 128  # plus the signal number: exit status of a signalled program in shells
NODE_LIMIT_S = 300.0  # profiling a machine takes a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSettings:
    node: NodeSettings
    shapes: Sequence[str]
    workloads: Sequence[str]
    contenders: Sequence[str]
    num_layers: int | None  # per shape; None for as many as fit memory and time
    limit_s: float
    max_rows: int
    total_s: float  # no part begins that this would not leave its limit
    is_again: bool  # whether parts with a result run again

    def parts(self, node: HardwareSpec) -> list[PartSettings]:
        """All parts, those of most interest first; those of a shape follow one another."""
        chosen = product(self.workloads, self.shapes, self.contenders)
        return [
            PartSettings(
                node=self.node,
                shape=shape,
                num_layers=self._layers(shape, workload, node),
                workload=workload,
                contender=contender,
                limit_s=self.limit_s,
                max_rows=self.max_rows,
            )
            for workload, shape, contender in sorted(
                chosen, key=lambda part: part[2] not in MAIN_CONTENDERS
            )
        ]

    def _layers(self, shape: str, workload: str, node: HardwareSpec) -> int:
        if self.num_layers is not None:
            return self.num_layers
        generated = GPU_WORKLOADS[workload].generated_tokens
        return layers_that_fit(shape, node, generated, LINK_SHARE * self.limit_s)


def run_gpu_suite(suite: SuiteSettings, out: Path, report: Report) -> Iterator[PartResult]:
    """Yield the result of every part, including those stored in `out`, with pictures and logs."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    with _ending_parts():
        yield from _results(suite, out, report)


def _results(suite: SuiteSettings, out: Path, report: Report) -> Iterator[PartResult]:
    end_s = time.monotonic() + suite.total_s
    results, node_file = out / RESULTS, out / "node.json"
    known = {result.key: result for result in read_results(results)}
    if suite.node.device == "cuda":
        report("measuring this machine, which takes a minute unless a profile was kept")
        node = _measure_node(suite.node, node_file, out / "logs" / "node.log")
    else:
        node = measured_node(suite.node, Settings.from_environment())
        node.to_file(node_file)
    parts = suite.parts(node)
    with closing(PartProcesses(node, node_file, out)) as processes:
        for number, part in enumerate(parts, 1):
            before = known.get(part.key)
            if before is not None and before.status == Status.DONE and not suite.is_again:
                report(f"{number} of {len(parts)}: {part.name} was measured {before.date}")
                yield before
                continue
            if time.monotonic() + part.limit_s > end_s:
                report(
                    f"{number} of {len(parts)}: not begun, as {format_seconds(suite.total_s)} are "
                    "nearly over; the same command continues, or raise --suite-limit"
                )
                return
            limit = format_seconds(part.limit_s)
            layers = f"{part.num_layers} layers"
            report(f"{number} of {len(parts)}: {part.name}, {layers}, at most {limit}")
            result = processes.run(part)
            append_result(results, result)
            yield result


class PartProcesses:
    """Runs parts in processes; parts of a shape that follow one another share one.

    They share its host memory, whose pages are made once, and what it has compiled.
    """

    def __init__(self, node: HardwareSpec, node_file: Path, out: Path) -> None:
        self._node, self._node_file, self._out = node, node_file, out
        self._process: subprocess.Popen[str] | None = None
        self._lines: Queue[str | None] = Queue()
        self._kind: tuple[str, bool] | None = None

    def run(self, part: PartSettings) -> PartResult:
        """Run a part; a process without a result, or past its time limit, counts as failed."""
        kind = (part.shape, part.contender == ACCELERATE)
        if kind != self._kind:
            self.close()
        log = log_of(part, self._out)
        process = self._process or self._start(log)
        self._kind = kind
        with suppress(BrokenPipeError):  # it has ended, and its status says why
            assert process.stdin is not None
            process.stdin.write(part.to_json() + "\n")
            process.stdin.flush()
        try:
            result = self._next_result(part.limit_s)
        except Empty:
            reason = f"did not end within {format_seconds(part.limit_s)}; see {log}"
        else:
            if result is not None:
                if result.status == Status.FAILED and part.node.device == "cuda":
                    self.close()  # an error of the device stays with its process
                return result
            reason = f"{_ending(process.wait())}; see {log}"
        self.close()
        return result_of(part, Status.FAILED, reason, self._node.name)

    def close(self) -> None:
        process, self._process, self._kind = self._process, None, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), process:
            pass  # waits for it, and closes its pipes

    def _start(self, log: Path) -> "subprocess.Popen[str]":
        module = [sys.executable, "-P", "-m", "raymoe.bench.gpu.part"]
        with os.fdopen(new_file(log), "w") as errors:
            process = subprocess.Popen(
                [*module, str(self._node_file), str(self._out)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._process, self._lines = process, Queue()
        threading.Thread(target=_read, args=(process, self._lines), daemon=True).start()
        return process

    def _next_result(self, limit_s: float) -> PartResult | None:
        """The next result; None if the process ends without one; raises Empty after the limit."""
        end_s = time.monotonic() + limit_s
        while True:
            line = self._lines.get(timeout=max(0.0, end_s - time.monotonic()))
            if line is None:
                return None
            if line.startswith("{"):
                return PartResult.from_json(line)


def _read(process: "subprocess.Popen[str]", lines: "Queue[str | None]") -> None:
    assert process.stdout is not None
    with suppress(ValueError):  # closed meanwhile
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _ending(code: int) -> str:
    if code < 0:
        return f"ended by signal {signal.Signals(-code).name} (perhaps for lack of memory)"
    return f"ended with status {code}"


@contextmanager
def _ending_parts() -> Iterator[None]:
    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(SIGNALLED + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure_node(settings: NodeSettings, file: Path, log: Path) -> HardwareSpec:
    command = [sys.executable, "-P", "-m", "raymoe.bench.gpu.node", settings.to_json(), str(file)]
    code, _ = _run(command, log, NODE_LIMIT_S)
    if code != 0:
        lines = read_text(log).splitlines() or ["no output"]
        raise ExecutionError(f"this machine cannot be measured: {lines[-1]}; see {log}")
    return HardwareSpec.from_file(file)


def _run(command: Sequence[str], log: Path, limit_s: float) -> tuple[int | None, str]:
    """Exit status and output; no status if the process group had to be killed."""
    with (
        os.fdopen(new_file(log), "w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process,
    ):
        try:
            text, _ = process.communicate(timeout=limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                return None, ""
            raise
    return process.returncode, text
