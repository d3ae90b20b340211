"""The CUDA path of the engine: on a GPU, and on a stand-in for one that works later than asked."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raymoe.config import EngineConfig
from raymoe.device.cuda import CudaDevice
from raymoe.engine.engine import Engine
from raymoe.errors import CapacityError, ConfigError, ExecutionError, PerformanceWarning
from raymoe.kernels.tensors import map_tensors
from raymoe.memory import shared_file
from raymoe.model.decoder import Decoder
from raymoe.plan.footprint import workspace_bytes
from raymoe.plan.policy import Choice
from raymoe.runtime.micro_batches import CutBatch
from raymoe.runtime.operations import StreamedMemory, StreamedState
from raymoe.schedule.builders import RING_SCHEDULES, STREAMING_BUILDERS
from raymoe.schedule.program import StepForm
from raymoe.specs.hardware import hardware_preset
from raymoe.units import GIB
from tests.integration import test_schedules as schedules
from tests.parity.cases import get_case
from tests.unit.device.deferred_cuda import (
    BreakableCuda,
    DeferredCuda,
    lane_threads,
    use_device,
    without_native_kernels,
)

__all__ = ["without_native_kernels"]

FAMILIES, SCENARIOS, PLACEMENTS = schedules.FAMILIES, schedules.SCENARIOS, schedules.DEVICES
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def check(family: str, schedule: str, scenario: str, placement: str, **config: object) -> None:
    schedules.check(family, schedule, scenario, PLACEMENTS[placement], device="cuda", **config)


# Streams that work as late as they may, and at random; in the default run one of them.
LAZY, RANDOM = 0.0, 0.4
LATER = [
    ("mixtral", "cgopipe", "mixed lengths", "pages", (RANDOM,)),
    ("mixtral", "module_batching", "long prompt", "staged", ()),
    ("mixtral", "flexgen_s4", "early end", "resident share", ()),
    ("deepseek_v3", "module_batching", "mixed lengths", "pages", ()),
    ("qwen2_moe", "micro_batches", "mixed lengths", "ring", ()),
]


@pytest.mark.parametrize(
    ("family", "schedule", "scenario", "placement", "delay"),
    [
        pytest.param(*each, delay, marks=() if delay in quick else pytest.mark.slow)
        for *each, quick in LATER
        for delay in (LAZY, RANDOM)
    ],
)
def test_a_device_that_works_later_gives_the_tokens_of_the_cpu(
    family: str,
    schedule: str,
    scenario: str,
    placement: str,
    delay: float,
    monkeypatch: pytest.MonkeyPatch,
    without_native_kernels: list[DeferredCuda],
) -> None:
    cuda = DeferredCuda(delay=delay)
    without_native_kernels.append(cuda)
    use_device(monkeypatch, lambda *_, **__: CudaDevice(cuda, GIB))
    check(family, schedule, scenario, placement, hardware=hardware_preset("t4"))
    # Blocks travel together; CGOPipe attends on the host, and these prompts come in one step.
    assert (cuda.num_batches > 0) == (schedule != "cgopipe")


def test_passes_allocate_nothing_and_a_full_gpu_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, without_native_kernels: list[DeferredCuda]
) -> None:
    name = schedules.plain_configuration("mixtral")
    config = {"schedule": "module_batching", "device_policy": PLACEMENTS["pages"]}
    config |= {"device": "cuda", "hardware": hardware_preset("t4"), "device_memory_bytes": GIB}
    cuda = DeferredCuda()
    without_native_kernels.append(cuda)
    opened = []

    def open_cuda(_index: int, *, memory_bytes: int) -> CudaDevice:
        opened.append(CudaDevice(cuda, memory_bytes))
        return opened[-1]

    use_device(monkeypatch, open_cuda)
    with schedules.make_engine(name, {}, **config) as engine:
        (device,), at_start = opened, list(cuda.allocated)
        assert engine.plan is not None
        footprint = engine.plan.device_footprint
        assert footprint is not None
        assert at_start[-1] == workspace_bytes(footprint)
        assert sum(at_start) <= footprint.total <= GIB
        engine.generate([[1, 2, 3]] * 3, {"temperature": 0, "max_tokens": 4})
        assert cuda.allocated == at_start
    cuda.allocated, cuda.memory_bytes = [], sum(at_start) - 1
    with pytest.raises(CapacityError, match=r"no .* left for intermediates(.|\n)*weights"):
        schedules.make_engine(name, {}, **config)
    cuda.allocated, cuda.memory_bytes = [], device.ledger.used_bytes // 2
    with pytest.raises(CapacityError, match="something else uses it"):
        schedules.make_engine(name, {}, **config)


def test_the_inputs_of_all_micro_batches_of_a_step_go_to_the_device_in_one_copy(
    monkeypatch: pytest.MonkeyPatch, without_native_kernels: list[DeferredCuda]
) -> None:
    cuda, counts, launches = DeferredCuda(), [], []
    without_native_kernels.append(cuda)
    use_device(monkeypatch, lambda *_, **__: CudaDevice(cuda, GIB))
    prepare, launch = StreamedMemory.prepare, cuda.launch
    monkeypatch.setattr(cuda, "launch", lambda work: (launches.append(work), launch(work)))

    def counted(memory: StreamedMemory, cut: CutBatch, form: StepForm) -> StreamedState:
        before = len(launches)
        state = prepare(memory, cut, form)
        counts.append(len(launches) - before)
        assert len(cut.micro_batches) == 3
        found: set[int] = set()
        sent = (state.positions_T, state.logit_places_R, state.staged)
        map_tensors(lambda each: found.add(each.untyped_storage().data_ptr()) or each, sent)
        assert len(found) == 1
        return state

    monkeypatch.setattr(StreamedMemory, "prepare", counted)
    check("mixtral", "module_batching", "long prompt", "pages", hardware=hardware_preset("t4"))
    assert set(counts) == {1}


def test_weights_that_cannot_be_pinned_go_through_a_ring(
    monkeypatch: pytest.MonkeyPatch, without_native_kernels: list[DeferredCuda]
) -> None:
    class RefusingCuda(BreakableCuda):
        """Refuses the first range, which is of the weights."""

        num_asked = 0

        def register(self, address: int, num_bytes: int) -> str | None:
            self.num_asked += 1
            return "refused" if self.num_asked == 1 else super().register(address, num_bytes)

    cuda = RefusingCuda()
    without_native_kernels.append(cuda)
    use_device(monkeypatch, lambda *_, **__: CudaDevice(cuda, GIB))
    with pytest.warns(PerformanceWarning, match=r"cannot pin .* of weights \(refused after 0 B of"):
        check(
            "mixtral", "module_batching", "mixed lengths", "pages", hardware=hardware_preset("t4")
        )
    assert cuda.num_asked > 1
    assert cuda.registered == set()


def test_an_engine_whose_device_fails_says_why_and_releases_all(
    monkeypatch: pytest.MonkeyPatch,
    without_native_kernels: list[DeferredCuda],
    tmp_path: Path,
) -> None:
    cuda = BreakableCuda()
    without_native_kernels.append(cuda)
    use_device(monkeypatch, lambda *_, **__: CudaDevice(cuda, GIB))
    monkeypatch.setattr(shared_file, "DIRECTORY", tmp_path)
    config = {"schedule": "module_batching", "device_policy": PLACEMENTS["pages"]}
    config |= {"device": "cuda", "hardware": hardware_preset("t4"), "shared_weights": True}
    engine = schedules.make_engine(schedules.plain_configuration("mixtral"), {}, **config)
    assert cuda.registered
    assert list(tmp_path.iterdir())
    cuda.fail("an illegal address")
    with pytest.raises(ExecutionError, match="an illegal address"):
        engine.generate([[1, 2, 3]], {"temperature": 0, "max_tokens": 4})
    with pytest.raises(RuntimeError, match="an illegal address"):
        engine.close()
    assert cuda.registered == set()
    assert lane_threads() == []
    assert list(tmp_path.iterdir()) == []


def test_after_a_step_without_memory_the_next_engine_plans_with_less(
    monkeypatch: pytest.MonkeyPatch,
    without_native_kernels: list[DeferredCuda],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def open_cuda(_index: int, *, memory_bytes: int) -> CudaDevice:
        without_native_kernels.append(DeferredCuda())
        return CudaDevice(without_native_kernels[-1], memory_bytes)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")

    use_device(monkeypatch, open_cuda)
    monkeypatch.setenv("RAYMOE_CACHE", str(tmp_path))
    directory = get_case(schedules.plain_configuration("mixtral")).directory
    config = EngineConfig(
        device="cuda", hardware=hardware_preset("t4"), device_memory_bytes=4 * GIB, dtype="float32"
    )
    with Engine.from_pretrained(directory, config) as engine, monkeypatch.context() as patch:
        assert engine.plan is not None
        planned = engine.plan
        assert planned.hardware.gpu_memory_bytes == 4 * GIB
        patch.setattr(Decoder, "post", fail)
        with pytest.raises(ExecutionError, match="out of memory"):
            engine.generate([[1, 2, 3]], {"temperature": 0, "max_tokens": 4})
    # Also where the driver has planned for all; sizes that somebody chose stay as they are.
    for choice, left_bytes in (
        ({}, 5 * GIB // 2),
        ({"planned": Choice(schedule=planned.schedule, policy=planned.policy)}, 5 * GIB // 2),
        ({"policy": planned.policy, "schedule": planned.schedule}, 4 * GIB),
    ):
        with Engine.from_pretrained(directory, replace(config, **choice)) as engine:
            assert engine.plan is not None
            assert engine.plan.hardware.gpu_memory_bytes == left_bytes
            assert len(engine.generate([[1, 2, 3]], {"max_tokens": 4})[0].token_ids) == 4
    assert "1.50 GiB of device memory stay free" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_device_is_refused_with_what_to_do() -> None:
    name = schedules.plain_configuration("mixtral")
    with pytest.raises(ConfigError, match=r"there is no GPU 0: .*choose the device 'cpu'"):
        schedules.make_engine(name, {}, device="cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("schedule", STREAMING_BUILDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_schedule_and_scenario(family: str, schedule: str, scenario: str) -> None:
    check(family, schedule, scenario, "pages")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("schedule", STREAMING_BUILDERS)
def test_every_schedule_and_placement(schedule: str, placement: str) -> None:
    if placement == "ring" and schedule not in RING_SCHEDULES:
        pytest.skip("it loads whole layers")
    check("qwen2_moe", schedule, "long prompt", placement)
