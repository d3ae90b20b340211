"""Run contenders in turns on the same rows, each run in its own process.

Machine speed changes from minute to minute, so each run is compared with the limits measured just
before and after it.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raymoe.bench.workloads import WORKLOADS, RowLengths, make_checkpoint
from raymoe.errors import ExecutionError
from raymoe.measure.timing import Limits, mean_limits, measure_limits
from raymoe.plan.bound import GEMM_EFFICIENCY, job_bound
from raymoe.specs.model import ModelSpec

Report = Callable[[str], None]
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    shape: str
    workload: str
    contender: str
    num_rows: int
    prompt_tokens: int
    generated_tokens: int
    prefill_s: float | None  # time of the job with one new token per row; None if not measured
    predicted_s: float | None  # prediction of the contender's own plan, if it has one
    total_s: float
    total_s_min: float
    total_s_max: float
    # Time of the job at the limits measured around each run, over its actual time.
    share_of_bound: float
    limits: Limits
    peak_rss_bytes: int

    @property
    def gap(self) -> float | None:
        return self.total_s / self.predicted_s - 1 if self.predicted_s else None

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.total_s

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"tokens_per_s": self.tokens_per_s})


@dataclass(frozen=True, slots=True)
class _Run:
    line: Line
    limits: Limits


def run_suite(
    *,
    shapes: Sequence[str],
    workloads: Sequence[str],
    contenders: Sequence[str],
    repetitions: int,
    num_threads: int,
    has_phases: bool,
    directory: Path,
    report: Report,
) -> Iterator[Result]:
    """Yield a result per shape, workload and contender; checkpoints in `directory` are reused."""
    for shape in shapes:
        report(f"checkpoint {shape}")
        model = make_checkpoint(shape, directory / shape)
        spec = ModelSpec.from_directory(model)
        for workload in workloads:
            runs: dict[str, list[_Run]] = {contender: [] for contender in contenders}
            limits = measure_limits(num_threads)
            for repetition in range(1, repetitions + 1):
                for contender in contenders:
                    report(f"{shape} {workload} {contender}, {repetition} of {repetitions}")
                    line = _run_contender(
                        contender,
                        "--model", str(model),
                        "--workload", workload,
                        "--num-threads", str(num_threads),
                        *(["--phases"] if has_phases else []),
                    )  # fmt: skip
                    before, limits = limits, measure_limits(num_threads)
                    runs[contender].append(_Run(line, mean_limits([before, limits])))
            for contender in contenders:
                yield _result(spec, (shape, workload, contender), runs[contender])


def _run_contender(*arguments: str) -> Line:
    command = [sys.executable, "-P", "-m", "raymoe.bench.contenders", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExecutionError(
            f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-4000:]}"
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1]))


def _result(spec: ModelSpec, names: tuple[str, str, str], runs: Sequence[_Run]) -> Result:
    shape, workload, contender = names
    rows = WORKLOADS[workload]
    totals = [run.line["total_s"] for run in runs]
    prefills = [run.line["prefill_s"] for run in runs if run.line["prefill_s"] is not None]
    predicted = [run.line["predicted_s"] for run in runs if run.line["predicted_s"] is not None]
    return Result(
        shape=shape,
        workload=workload,
        contender=contender,
        num_rows=rows.num_rows,
        prompt_tokens=sum(rows.prompt_lengths()),
        generated_tokens=rows.num_rows * rows.generated_tokens,
        prefill_s=statistics.median(prefills) if prefills else None,
        predicted_s=statistics.median(predicted) if predicted else None,
        total_s=statistics.median(totals),
        total_s_min=min(totals),
        total_s_max=max(totals),
        share_of_bound=statistics.median(
            _bound_s(spec, rows, run.limits) / run.line["total_s"] for run in runs
        ),
        limits=mean_limits([run.limits for run in runs]),
        peak_rss_bytes=int(max(run.line["peak_rss_bytes"] for run in runs)),
    )


def _bound_s(spec: ModelSpec, rows: RowLengths, limits: Limits) -> float:
    return job_bound(
        spec,
        rows.prompt_lengths(),
        rows.generated_tokens,
        flop_per_s=GEMM_EFFICIENCY * limits.flop_per_s,
        bytes_per_s=limits.bytes_per_s,
    ).total_s
