"""The result of a part: one JSON line, whether it was measured, left out, or failed."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from raymoe.bench.gpu.settings import PartSettings
from raymoe.errors import ConfigError
from raymoe.measure.profile import keep
from raymoe.specs.files import from_plain


class Status(StrEnum):
    """How a part ended."""

    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyShares:
    """Busy share of each resource over the passes of a run, 0..1."""

    gpu: float
    cpu: float
    htod: float
    dtoh: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedFigures:
    """What a plan said, and what was moved by it; only of our engine.

    Attributes:
        predicted_s: Seconds of the job, from the plan.
        passes_predicted_s: Of the passes that were run, from the cost model.
        passes_measured_s: The same, measured.
        link_bytes_per_s: Weights over the time in which their pages were copied; 0 where none were.
        busy: Shares over all passes.
        plan: The plan for people.
    """

    predicted_s: float
    passes_predicted_s: float
    passes_measured_s: float
    link_bytes_per_s: float
    busy: BusyShares
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured.

    Attributes:
        schedule: Of the tasks; that of its hooks for accelerate.
        policy: Whose sizes.
        num_rows: Rows of the job.
        prompt_tokens: Of all rows.
        generated_tokens: Of all rows.
        prefill_s: The job with one new token for each row.
        total_s: The job.
        num_measured_steps: Decode steps that were measured; where they are fewer than those of the
            job, its time is that of the prefill and of as many mean steps.
        pinned_bytes_per_s: Copies from pinned memory to the device, measured just before.
        bound_s: The job at the limits of the node.
        limit: What binds there.
        device_peak_bytes: Most device memory that torch reserved; 0 where there is none.
        peak_rss_bytes: Most host memory of the process.
        model: What our engine says besides.
    """

    schedule: str
    policy: str
    num_rows: int
    prompt_tokens: int
    generated_tokens: int
    prefill_s: float
    total_s: float
    num_measured_steps: int
    pinned_bytes_per_s: float
    bound_s: float
    limit: str
    device_peak_bytes: int
    peak_rss_bytes: int
    model: PredictedFigures | None = None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, end to end."""
        return self.generated_tokens / self.total_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens beyond the first of each row over the time beyond the prefill; 0 without any."""
        decode_s = self.total_s - self.prefill_s
        decoded = self.generated_tokens - self.num_rows
        return decoded / decode_s if decode_s > 0 else 0.0

    @property
    def share_of_bound(self) -> float:
        """Time at the limits of the node over the time it took."""
        return self.bound_s / self.total_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """One line of results.

    Attributes:
        key: Of the settings.
        settings: What was asked for.
        status: How it ended.
        reason: Why there are no figures; empty where there are.
        whole_layers: Of the published model, of which the settings say how many were taken.
        date: UTC, ISO 8601.
        device_name: As the driver calls it, or the preset.
        versions: Of torch and others.
        figures: None unless it is done.
    """

    key: str
    settings: PartSettings
    status: str
    reason: str
    whole_layers: int
    date: str
    device_name: str
    versions: str
    figures: Figures | None = None

    def to_json(self) -> str:
        """One line, with the derived figures for other programs."""
        derived = {}
        if self.figures is not None:
            names = ("tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s")
            derived = {name: getattr(self.figures, name) for name in (*names, "share_of_bound")}
        return json.dumps(asdict(self) | {"derived": derived})

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: It is something else.
        """
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"it is not JSON: {line:.60}") from error
        if isinstance(fields, dict):
            fields.pop("derived", None)
        return from_plain(cls, fields, where="PartResult")


def read_results(path: Path) -> list[PartResult]:
    """Results of a file in their order; of equal settings the latest, where the first was.

    Raises:
        ConfigError: A line is something else; says which.
    """
    latest: dict[str, PartResult] = {}
    for number, line in enumerate(_lines(path), 1):
        try:
            result = PartResult.from_json(line)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}; choose another --out") from error
        latest[result.key] = result
    return list(latest.values())


def append_result(path: Path, result: PartResult) -> None:
    """Add a line; readers see it whole or not at all."""
    text = "".join(f"{line}\n" for line in (*_lines(path), result.to_json()))
    keep(path, lambda written: written.write_text(text))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
