"""Run parts of the GPU suite one after another, in one process whose host memory they share.

Arguments of `python -m` this module: the node file, and the directory for pictures and logs. Each
line of standard input is a part (`PartSettings.to_json`); its result is printed as one JSON line.
"""

import os
import sys
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from raymoe.bench.gpu.node import HostMemory, cap_device, device_name, free_device
from raymoe.bench.gpu.settings import (
    ACCELERATE,
    Figures,
    PartResult,
    PartSettings,
    SkipPartError,
    Status,
    shape_spec,
)
from raymoe.specs.files import new_file
from raymoe.specs.hardware import HardwareSpec

PACKAGES = ("torch", "transformers", "triton", "accelerate")


def run_part(
    settings: PartSettings, node: HardwareSpec, out: Path, memory: HostMemory
) -> PartResult:
    device, figures, reason, status = settings.node.device, None, "", Status.DONE
    name = device_name(device, node.name)
    try:
        cap_device(device, node.gpu_memory_bytes)
        figures = _measure(settings, node, out, memory)
    except SkipPartError as error:
        status, reason = Status.SKIPPED, str(error)
    except Exception as error:  # one part must not end the suite; the log has the traceback
        traceback.print_exc()
        status, reason = Status.FAILED, f"{type(error).__name__}: {error}"
    return replace(result_of(settings, status, reason, name), figures=figures)


def _measure(settings: PartSettings, node: HardwareSpec, out: Path, memory: HostMemory) -> Figures:
    if settings.contender != ACCELERATE:
        from raymoe.bench.gpu.engines import measure_engine  # noqa: PLC0415

        return measure_engine(settings, node, out, memory)
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


def log_of(settings: PartSettings, out: Path) -> Path:
    return out / "logs" / f"{settings.file_name}.log"


def main() -> None:
    node, out = HardwareSpec.from_file(sys.argv[1]), Path(sys.argv[2])
    memory = HostMemory(node.host_memory_bytes)
    for line in sys.stdin:
        settings = PartSettings.from_json(line)
        with os.fdopen(new_file(log_of(settings, out)), "w") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
        result = run_part(settings, node, out, memory)
        print(result.to_json(), flush=True)
        free_device(settings.node.device)


if __name__ == "__main__":
    main()
