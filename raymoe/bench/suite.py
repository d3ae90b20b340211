"""Run contenders on the same rows, one after another, between measurements of the machine."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raymoe.bench.workloads import WORKLOADS, make_checkpoint
from raymoe.errors import ExecutionError
from raymoe.kernels.cpu_probe import peak_flop_per_s, read_bandwidth_bytes_per_s
from raymoe.plan.bound import GEMM_EFFICIENCY, JobBound, job_bound
from raymoe.specs.model import ModelSpec

Report = Callable[[str], None]
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the machine can do right now."""

    flop_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One contender on one shape and workload: medians over the repetitions.

    Attributes:
        prefill_s: Time of the job with one new token for each row; None where not asked for.
        bound_s: Time of the job at the limits measured just before and after, nothing lost.
        share_of_bound: bound_s / total_s.
    """

    shape: str
    workload: str
    contender: str
    num_rows: int
    prompt_tokens: int
    generated_tokens: int
    prefill_s: float | None
    total_s: float
    total_s_min: float
    total_s_max: float
    bound_s: float
    limits: Limits
    peak_rss_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, prefill included."""
        return self.generated_tokens / self.total_s

    @property
    def share_of_bound(self) -> float:
        """Share of the machine's limit, 0..1."""
        return self.bound_s / self.total_s

    def to_json(self) -> str:
        """One JSON line, with the derived figures."""
        derived = {"tokens_per_s": self.tokens_per_s, "share_of_bound": self.share_of_bound}
        return json.dumps(asdict(self) | derived)


def measure_limits(num_threads: int) -> Limits:
    """Read bandwidth and bfloat16 peak of this machine, about two seconds."""
    return Limits(
        flop_per_s=peak_flop_per_s(num_threads, "bfloat16"),
        bytes_per_s=read_bandwidth_bytes_per_s(num_threads),
    )


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
    """Yield a result for each shape, workload and contender, in that order.

    Checkpoints are made in `directory` and kept for the next time; `report` is told what is being
    done.
    """
    for shape in shapes:
        report(f"checkpoint {shape}")
        model = make_checkpoint(shape, directory / shape)
        spec = ModelSpec.from_directory(model)
        for workload in workloads:
            before = measure_limits(num_threads)
            runs = {}
            for contender in contenders:
                report(f"{shape} {workload} {contender}, {repetitions} repetitions")
                runs[contender] = _run_contender(
                    contender,
                    "--model", str(model),
                    "--workload", workload,
                    "--repetitions", str(repetitions),
                    "--num-threads", str(num_threads),
                    *(["--phases"] if has_phases else []),
                )  # fmt: skip
            limits = _mean_limits(before, measure_limits(num_threads))
            for contender, lines in runs.items():
                yield _result(spec, (shape, workload, contender), lines, limits)


def _mean_limits(before: Limits, after: Limits) -> Limits:
    return Limits(
        flop_per_s=(before.flop_per_s + after.flop_per_s) / 2,
        bytes_per_s=(before.bytes_per_s + after.bytes_per_s) / 2,
    )


def _run_contender(*arguments: str) -> list[Line]:
    command = [sys.executable, "-m", "raymoe.bench.contenders", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExecutionError(
            f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _result(
    spec: ModelSpec, names: tuple[str, str, str], lines: list[Line], limits: Limits
) -> Result:
    shape, workload, contender = names
    rows = WORKLOADS[workload]
    lengths = rows.prompt_lengths()
    totals = [line["total_s"] for line in lines]
    prefills = [line["prefill_s"] for line in lines if line["prefill_s"] is not None]
    return Result(
        shape=shape,
        workload=workload,
        contender=contender,
        num_rows=rows.num_rows,
        prompt_tokens=sum(lengths),
        generated_tokens=rows.num_rows * rows.generated_tokens,
        prefill_s=statistics.median(prefills) if prefills else None,
        total_s=statistics.median(totals),
        total_s_min=min(totals),
        total_s_max=max(totals),
        bound_s=_bound(spec, lengths, rows.generated_tokens, limits).total_s,
        limits=limits,
        peak_rss_bytes=int(max(line["peak_rss_bytes"] for line in lines)),
    )


def _bound(spec: ModelSpec, lengths: Iterable[int], generated: int, limits: Limits) -> JobBound:
    return job_bound(
        spec,
        list(lengths),
        generated,
        flop_per_s=GEMM_EFFICIENCY * limits.flop_per_s,
        bytes_per_s=limits.bytes_per_s,
    )
