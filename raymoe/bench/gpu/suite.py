"""Run the parts of the GPU suite in turn, each in a process with a time limit."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType

from raymoe.bench.gpu.node import measured_node
from raymoe.bench.gpu.part import result_of
from raymoe.bench.gpu.settings import (
    GPU_WORKLOADS,
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
from raymoe.specs.hardware import HardwareSpec
from raymoe.units import format_seconds

Report = Callable[[str], None]

RESULTS = "gpu.jsonl"
# Share of a part's limit that the weights of all steps may take on the link. Schedules that wait
# for them take up to twice that.
LINK_SHARE = 0.3
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
    is_again: bool  # whether parts with a result run again

    def parts(self, node: HardwareSpec) -> list[PartSettings]:
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
            for shape, workload, contender in product(self.shapes, self.workloads, self.contenders)
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
    results = out / RESULTS
    known = {result.key: result for result in read_results(results)}
    node_file = out / "node.json"
    if suite.node.device == "cuda":
        report("the node: a profile takes a minute where there is none yet")
        node = _measure_node(suite.node, node_file, out / "logs" / "node.log")
    else:
        node = measured_node(suite.node, Settings.from_environment())
        node.to_file(node_file)
    parts = suite.parts(node)
    for number, part in enumerate(parts, 1):
        before = known.get(part.key)
        if before is not None and before.status == Status.DONE and not suite.is_again:
            report(f"{number} of {len(parts)}: {part.name} was measured {before.date}")
            yield before
            continue
        limit = format_seconds(part.limit_s)
        report(f"{number} of {len(parts)}: {part.name}, {part.num_layers} layers, at most {limit}")
        result = run_in_process(part, node, node_file, out)
        append_result(results, result)
        yield result


def run_in_process(
    part: PartSettings, node: HardwareSpec, node_file: Path, out: Path
) -> PartResult:
    """Run a part; a process without a result, or past its time limit, counts as failed."""
    log = out / "logs" / f"{part.file_name}.log"
    module = [sys.executable, "-m", "raymoe.bench.gpu.part"]
    arguments = [part.to_json(), str(node_file), str(out)]
    code, text = _run([*module, *arguments], log, part.limit_s)
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if code == 0 and lines:
        return PartResult.from_json(lines[-1])
    if code is None:
        reason = f"not done after {format_seconds(part.limit_s)}; see {log}"
    elif code < 0:
        reason = f"ended by signal {signal.Signals(-code).name} (of memory, perhaps); see {log}"
    else:
        reason = f"ended with status {code}; see {log}"
    return result_of(part, Status.FAILED, reason, node.name)


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
    command = [sys.executable, "-m", "raymoe.bench.gpu.node", settings.to_json(), str(file)]
    code, _ = _run(command, log, NODE_LIMIT_S)
    if code != 0:
        lines = log.read_text().splitlines() or ["no output"]
        raise ExecutionError(f"the node cannot be measured: {lines[-1]}; see {log}")
    return HardwareSpec.from_file(file)


def _run(command: Sequence[str], log: Path, limit_s: float) -> tuple[int | None, str]:
    """Exit status and output; no status if the process group had to be killed."""
    with (
        log.open("w") as errors,
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
