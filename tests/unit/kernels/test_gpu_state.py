"""States on a device against the plain float64 reference: Triton's kernels, and torch in chunks."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.kernels.gpu_state import scan as scans
from raymoe.kernels.gpu_state.scan import (
    StateBatch,
    causal_conv_on_device,
    scan_on_device,
)
from raymoe.kernels.tensors import to_device
from tests.kinds import covering
from tests.native.test_cpu_state import (
    BF16,
    DTYPES,
    FP32,
    HEADS,
    KINDS,
    STEPS,
    ConvCase,
    ScanCase,
    fill_states,
    make_batch,
    part_of,
)
from tests.triton_mode import DEVICES
from tests.unit.kernels.ahead import SHARED_BYTES, fitting_kernels

TORCH = pytest.param("torch", id="torch")
ways = pytest.mark.parametrize("way", [TORCH, *DEVICES])
kernels = pytest.mark.parametrize("way", DEVICES)
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory takes the way of a GPU where the interpreter is tested."""
    way = request.node.callspec.params.get("way") if hasattr(request.node, "callspec") else None
    if way in {"cpu", "cuda"}:
        pytest.importorskip("triton")
        monkeypatch.setattr(scans, "triton_runs_on", lambda _device: True)


def device_of(way: str) -> str:
    return "cpu" if way == "torch" else way


class OnDevice:
    """Runs a case of the CPU's kernels on a device; its own assertions compare the results."""

    def __init__(self, way: str) -> None:
        self._device = torch.device(device_of(way))

    def batch(self, case: ScanCase | ConvCase) -> StateBatch:
        return to_device(StateBatch.of(case.batch, self._device), self._device)

    def scan(self, case: ScanCase, states: Tensor) -> Tensor:
        tensors = (case.query, case.key, case.value, case.log_decay, case.gain)
        on_device = states.to(self._device)
        out = scan_on_device(
            *(each.to(self._device) for each in tensors),
            on_device,
            self.batch(case),
            scale=case.scale,
            delta=case.delta,
            normalize=case.normalize,
        )
        states.copy_(on_device)
        return out.cpu()

    def convolve(self, case: ConvCase, states: Tensor) -> Tensor:
        on_device, bias = states.to(self._device), case.bias
        out = causal_conv_on_device(
            case.inputs.to(self._device),
            case.weight.t().contiguous().to(self._device).t(),
            None if bias is None else bias.to(self._device),
            on_device,
            self.batch(case),
            activation=case.activation,
        )
        states.copy_(on_device)
        return out.cpu()


def check_scan(case: ScanCase, way: str) -> None:
    """`ScanCase.assert_accurate` with the device's kernel in place of the CPU's."""
    on_device = OnDevice(way)

    class Case(ScanCase):
        def run(self, states: Tensor | None = None) -> Tensor:
            return on_device.scan(self, self.states.clone() if states is None else states)

    Case(**{name: getattr(case, name) for name in ScanCase.__slots__}).assert_accurate()


def check_convolution(case: ConvCase, way: str) -> None:
    on_device = OnDevice(way)

    class Case(ConvCase):
        def run(self, states: Tensor | None = None) -> Tensor:
            return on_device.convolve(self, self.states.clone() if states is None else states)

    Case(**{name: getattr(case, name) for name in ConvCase.__slots__}).assert_accurate()


SHORT = {
    "one token": [(1, 1)],
    "decode": [(1, 1), (31, 1), (2, 1)],
    "prefill": [(5, 5), (18, 18), (2, 2)],
    "mixed": [(33, 1), (9, 9), (1, 1), (200, 3), (40, 6), (9, 0)],
}


@ways
@pytest.mark.parametrize("sequences", SHORT.values(), ids=SHORT)
def test_a_convolution_equals_the_reference(sequences: list[tuple[int, int]], way: str) -> None:
    for (channels, taps), dtype in zip(
        ((24, 4), (8, 3), (67, 1), (600, 2), (40, 9)), itertools.cycle(DTYPES), strict=False
    ):
        check_convolution(ConvCase.random(sequences, channels, taps, dtype), way)


@ways
def test_a_convolution_without_bias_or_activation_equals_the_reference(way: str) -> None:
    case = ConvCase.random(SHORT["mixed"], 40)
    case.bias = None
    check_convolution(case, way)
    case.activation = "none"
    check_convolution(case, way)


@ways
def test_a_large_sum_is_its_own_silu_and_a_small_one_vanishes(way: str) -> None:
    case = ConvCase.random([(1, 1)], 16)
    case.inputs = torch.linspace(-200, 200, 16)[None]
    case.weight, case.bias = torch.ones(16, 4), None
    check_convolution(case, way)


@ways
@covering(kind=[*KINDS], sequences=SHORT)
def test_a_scan_equals_the_reference(sequences: list[tuple[int, int]], kind: str, way: str) -> None:
    dtype = DTYPES[list(KINDS).index(kind)]
    check_scan(ScanCase.random(sequences, (1, 2, 24, 40), kind, dtype), way)


@pytest.mark.slow
@ways
@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sequences", STEPS.values(), ids=STEPS)
def test_a_scan_equals_the_reference_for_every_shape_of_step(
    sequences: list[tuple[int, int]], dtype: torch.dtype, kind: str, way: str
) -> None:
    check_scan(ScanCase.random(sequences, (1, 2, 32, 64), kind, dtype), way)


@ways
@covering(kind=[*KINDS], heads=[HEADS[4], HEADS[5]])
def test_a_scan_equals_the_reference_for_shapes_of_heads(
    heads: tuple[int, int, int, int], kind: str, way: str
) -> None:
    check_scan(ScanCase.random([(70, 1), (12, 4), (3, 3)], heads, kind), way)


@pytest.mark.slow
@ways
@kinds
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_scan_equals_the_reference_for_every_shape_of_heads(
    heads: tuple[int, int, int, int], kind: str, way: str
) -> None:
    check_scan(ScanCase.random([(70, 1), (50, 40), (3, 3)], heads, kind), way)


@kinds
@pytest.mark.parametrize(
    ("chunk_bytes", "chunk_tokens"), [(1, 16), (100_000, 7), (1 << 30, 64), (1 << 30, 1)]
)
def test_chunks_of_any_size_give_the_same(
    chunk_bytes: int, chunk_tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(scans, "CHUNK_TOKENS", chunk_tokens)
    case = ScanCase.random([(99, 40), (33, 33), (16, 16)], (2, 4, 16, 8), kind)
    check_scan(case, "torch")
    check_convolution(ConvCase.random([(99, 40), (33, 33)], 24), "torch")


@kernels
def test_long_prompts_are_scanned_in_chunks_beside_others(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "MIN_CHUNKED_TOKENS", 20)
    monkeypatch.setattr(scans, "CHUNK_TOKENS", 8)
    case = ScanCase.random([(20, 20), (19, 19), (30, 1), (50, 30)], (1, 2, 16, 16))
    batch = OnDevice(way).batch(case)
    assert len(batch.scanned_SF) == 2
    assert [len(chunks.levels) for chunks in batch.chunks] == [3 + 4]
    check_scan(case, way)


@ways
@kinds
def test_bfloat16_states_are_rounded_once_after_the_last_token(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "CHUNK_TOKENS", 4)
    case = ScanCase.random([(15, 9), (6, 6), (30, 1)], (1, 2, 24, 40), kind)
    stored = case.states.to(BF16)
    wide = stored.float()
    want = OnDevice(way).scan(case, wide)
    assert torch.equal(OnDevice(way).scan(case, stored), want)
    slots = case.batch.slots.long()
    assert torch.equal(stored[slots], wide[slots].to(BF16))


@ways
def test_a_state_that_decays_wholly_is_forgotten(way: str) -> None:
    for kind in KINDS:
        case = ScanCase.random([(9, 4), (20, 12)], (1, 1, 16, 16), kind)
        case.log_decay[1] = case.log_decay[9] = -torch.inf
        check_scan(case, way)


@ways
def test_decay_is_exact_after_a_state_was_forgotten(way: str) -> None:
    """Differences of sums are: those of float32 would have lost the later, smaller decays."""
    case = ScanCase.random([(16, 16)], (1, 1, 16, 16), "kimi")
    case.log_decay[:] = -1e-3
    case.log_decay[2:9] = -5e4
    check_scan(case, way)


@ways
def test_a_step_without_tokens_changes_nothing(way: str) -> None:
    for sequences in ([], [(7, 0), (0, 0)]):
        scanned, convolved = (
            ScanCase.random(sequences, (1, 2, 16, 24)),
            ConvCase.random(sequences, 24),
        )
        states = scanned.states.clone(), convolved.states.clone()
        assert OnDevice(way).scan(scanned, states[0]).shape == (0, 2, 24)
        assert OnDevice(way).convolve(convolved, states[1]).shape == (0, 24)
        assert torch.equal(states[0].isnan(), scanned.states.isnan())
        assert torch.equal(states[1].isnan(), convolved.states.isnan())


@kernels
@pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=pytest.mark.slow), BF16], ids=str)
def test_neither_steps_nor_batch_change_a_bit(dtype: torch.dtype, way: str) -> None:
    """Of Triton's kernels, as of the CPU's."""
    on_device = OnDevice(way)
    for kind in KINDS:
        case = ScanCase.random([(9, 8), (7, 7), (30, 1)], (1, 2, 24, 40), kind, dtype)
        conv = ConvCase.random([(9, 8), (7, 7), (30, 1)], 24, 4, dtype)
        conv.batch = case.batch
        fill_states(conv.states, case.batch, torch.default_generator)
        whole, whole_past = case.states.clone(), conv.states.clone()
        conv.states = whole_past.clone()
        want = on_device.scan(case, whole), on_device.convolve(conv, whole_past)
        starts = case.batch.query_start.tolist()
        for sequence, chunk in ((0, 3), (1, 1), (2, 1)):
            states, past = case.states.clone(), conv.states.clone()
            count = starts[sequence + 1] - starts[sequence]
            for begin in range(0, count, chunk):
                end = min(begin + chunk, count)
                rows = slice(starts[sequence] + begin, starts[sequence] + end)
                batch = part_of(case.batch, sequence, begin, end)
                part = replace(
                    case,
                    query=case.query[rows],
                    key=case.key[rows],
                    value=case.value[rows],
                    log_decay=case.log_decay[rows],
                    gain=case.gain[rows],
                    batch=batch,
                )
                assert torch.equal(on_device.scan(part, states), want[0][rows])
                cut = replace(conv, inputs=conv.inputs[rows], batch=batch)
                assert torch.equal(on_device.convolve(cut, past), want[1][rows])
            slot = case.batch.slots[sequence]
            assert torch.equal(states[slot], whole[slot])
            assert torch.equal(past[slot], whole_past[slot])


def test_a_batch_without_slots_is_refused() -> None:
    batch = replace(make_batch([(1, 1)], [0]), slots=None)
    with pytest.raises(ConfigError, match="slots is None; layers that keep states need the slot"):
        StateBatch.of(batch, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(
    capability: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    with capsys.disabled():
        found = fitting_kernels("compile_state", capability, tmp_path)
    # With float32 inputs the compiler spills up to 16 bytes on SM80 to SM89 to fit more programs.
    assert all(kernel["spilled_bytes"] == 0 for kernel in found if kernel["dtype"] != "float32")
