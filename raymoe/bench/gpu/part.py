"""Run one part of the GPU suite and print its result as one JSON line.

Arguments of `python -m` this module: the settings from `PartSettings.to_json`, the node file and
the directory for pictures.
"""

import sys
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from raymoe.bench.gpu.node import cap_device, device_name
from raymoe.bench.gpu.settings import (
    ACCELERATE,
    Figures,
    PartResult,
    PartSettings,
    SkipPartError,
    Status,
    shape_spec,
)
from raymoe.specs.hardware import HardwareSpec

PACKAGES = ("torch", "transformers", "triton", "accelerate")


def run_part(settings: PartSettings, node: HardwareSpec, out: Path) -> PartResult:
    device, figures, reason, status = settings.node.device, None, "", Status.DONE
    name = device_name(device, node.name)
    try:
        cap_device(device, node.gpu_memory_bytes)
        figures = _measure(settings, node, out)
    except SkipPartError as error:
        status, reason = Status.SKIPPED, str(error)
    except Exception as error:  # one part must not end the suite; the log has the traceback
        traceback.print_exc()
        status, reason = Status.FAILED, f"{type(error).__name__}: {error}"
    return replace(result_of(settings, status, reason, name), figures=figures)


def _measure(settings: PartSettings, node: HardwareSpec, out: Path) -> Figures:
    if settings.contender != ACCELERATE:
        from raymoe.bench.gpu.engines import measure_engine  # noqa: PLC0415

        return measure_engine(settings, node, out)
    if settings.node.device != "cuda":
        raise SkipPartError("accelerate moves weights to a GPU; an emulated device is none")
    from raymoe.bench.gpu.engines import measure_accelerate  # noqa: PLC0415

    return measure_accelerate(settings, node, settings.node.device)


def result_of(settings: PartSettings, status: Status, reason: str, device: str) -> PartResult:
    return PartResult(
        key=settings.key,
        settings=settings,
        status=status,
        reason=reason,
        whole_layers=shape_spec(settings.shape).num_layers,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device_name=device,
        versions=", ".join(_versions()),
    )


def _versions() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    settings = PartSettings.from_json(sys.argv[1])
    result = run_part(settings, HardwareSpec.from_file(sys.argv[2]), Path(sys.argv[3]))
    print(result.to_json(), flush=True)


if __name__ == "__main__":
    main()
