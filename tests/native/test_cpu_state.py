"""Kernels of state layers against a plain float64 reference, on every instruction set."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.state import causal_conv, scan
from tests.kinds import covering

pytestmark = pytest.mark.usefixtures("isa")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [FP32, FP16, BF16]
UNIT = {FP32: 1e-5, FP16: 2**-10, BF16: 2**-7}
# Context and new tokens of each sequence.
STEPS = {
    "one token": [(1, 1)],
    "decode": [(1, 1), (31, 1), (2, 1), (100, 1)],
    "prefill": [(5, 5), (70, 70), (2, 2), (33, 33)],
    "chunks": [(40, 8), (65, 33), (160, 100), (3, 2), (9, 0)],
    "mixed": [(33, 1), (96, 96), (1, 1), (200, 3), (64, 32)],
}
# Groups, heads, K, V: Gated DeltaNet, Mamba-2, tiny models, tails of every vector.
HEADS = [(1, 2, 128, 128), (1, 4, 128, 64), (2, 4, 16, 32), (1, 1, 8, 8), (3, 3, 24, 72)]
HEADS += [(1, 2, 256, 40), (1, 1, 64, 256), (2, 2, 40, 104)]
KINDS = {"deltanet": (False, True), "kimi": (True, True), "mamba": (False, False)}


def make_batch(sequences: Sequence[tuple[int, int]], slots: Sequence[int]) -> AttentionBatch:
    starts = [0, *itertools.accumulate(tokens for _, tokens in sequences)]
    return AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_tokens=torch.tensor([context for context, _ in sequences], dtype=torch.int32),
        block_table=torch.empty(0, 0, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
    )


def part_of(batch: AttentionBatch, sequence: int, begin: int, end: int) -> AttentionBatch:
    """The batch of new tokens [begin, end) of one sequence."""
    first, last = batch.query_start[sequence : sequence + 2].tolist()
    context = int(batch.context_tokens[sequence]) - (last - first) + end
    return make_batch([(context, end - begin)], [int(batch.slots[sequence])])


def random_slots(sequences: Sequence[tuple[int, int]], generator: torch.Generator) -> list[int]:
    return torch.randperm(len(sequences) + 2, generator=generator)[: len(sequences)].tolist()


def fill_states(states: Tensor, batch: AttentionBatch, generator: torch.Generator) -> None:
    """Random states of sequences with a past; all others are NaN."""
    states.fill_(torch.nan)
    num_new = batch.query_start.diff()
    for context, new, slot in zip(batch.context_tokens, num_new, batch.slots, strict=True):
        if context > new:
            states[slot] = torch.randn(states.shape[1:], generator=generator).to(states.dtype)


def of_threads(run: Callable[[], Tensor]) -> list[Tensor]:
    num_threads = _native.num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            _native.set_num_threads(count)
            results.append(run())
    finally:
        _native.set_num_threads(num_threads)
    return results


@dataclass(slots=True)
class ConvCase:
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    states: Tensor
    batch: AttentionBatch
    activation: Literal["silu", "none"]

    @classmethod
    def random(
        cls,
        sequences: Sequence[tuple[int, int]],
        channels: int,
        taps: int = 4,
        dtype: torch.dtype = FP32,
        seed: int | None = None,
    ) -> "ConvCase":
        generator = torch.Generator()
        generator.manual_seed(generator.seed() if seed is None else seed)
        batch = make_batch(sequences, random_slots(sequences, generator))
        states = torch.empty(len(sequences) + 2, taps - 1, channels, dtype=dtype)
        fill_states(states, batch, generator)
        num_tokens = int(batch.query_start[-1])
        return cls(
            # Strided rows: the inputs are often a part of a wider projection.
            inputs=torch.randn(num_tokens, channels + 3, generator=generator).to(dtype)[
                :, :channels
            ],
            weight=torch.randn(channels, taps, generator=generator),
            bias=torch.randn(channels, generator=generator),
            states=states,
            batch=batch,
            activation="silu",
        )

    def run(self, states: Tensor | None = None) -> Tensor:
        states = self.states.clone() if states is None else states
        return causal_conv(
            self.inputs, self.weight, self.bias, states, self.batch, activation=self.activation
        )

    def reference(self, states: Tensor) -> Tensor:
        """Float64, not rounded; `states` becomes what the kernel must leave."""
        out = torch.empty(self.inputs.shape, dtype=torch.float64)
        taps = self.weight.shape[1]
        starts = self.batch.query_start.tolist()
        for index, slot in enumerate(self.batch.slots.tolist()):
            begin, end = starts[index], starts[index + 1]
            if begin == end:
                continue
            is_fresh = int(self.batch.context_tokens[index]) == end - begin
            past = torch.zeros_like(states[slot]) if is_fresh else states[slot]
            rows = torch.cat([past, self.inputs[begin:end]])
            windows = rows.double().unfold(0, taps, 1)  # [tokens, C, taps]
            sums = (windows * self.weight.double()).sum(-1)
            out[begin:end] = sums if self.bias is None else sums + self.bias.double()
            states[slot] = rows[end - begin :]
        return torch.nn.functional.silu(out) if self.activation == "silu" else out

    def assert_accurate(self) -> None:
        got_states, want_states = self.states.clone(), self.states.clone()
        got, want = self.run(got_states), self.reference(want_states)
        assert got.dtype == self.inputs.dtype
        unit = UNIT[self.inputs.dtype]
        torch.testing.assert_close(got.double(), want, rtol=unit, atol=unit)
        assert torch.equal(got_states.nan_to_num(77), want_states.nan_to_num(77))


@covering(dtype=DTYPES, sequences=STEPS)
def test_a_convolution_equals_the_reference(
    sequences: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    for channels, taps in ((24, 4), (8, 3), (1, 2), (67, 1), (1100, 4), (40, 9)):
        ConvCase.random(sequences, channels, taps, dtype).assert_accurate()


def test_a_convolution_without_bias_or_activation_equals_the_reference() -> None:
    case = ConvCase.random(STEPS["mixed"], 40)
    case.bias = None
    case.assert_accurate()
    case.activation = "none"
    case.assert_accurate()


def test_a_large_sum_is_its_own_silu_and_a_small_one_vanishes() -> None:
    case = ConvCase.random([(1, 1)], 16)
    case.inputs = torch.linspace(-200, 200, 16)[None]
    case.weight, case.bias = torch.ones(16, 4), None
    case.assert_accurate()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_steps_nor_threads_nor_batch_change_a_bit_of_a_convolution(
    dtype: torch.dtype,
) -> None:
    case = ConvCase.random([(150, 140), (97, 97), (30, 1)], 1100, 4, dtype)
    first, *others = of_threads(case.run)
    assert all(torch.equal(first, other) for other in others)
    starts = case.batch.query_start.tolist()
    for sequence, chunk in itertools.product(range(3), (1, 2, 7, 64)):
        states = case.states.clone()
        count = starts[sequence + 1] - starts[sequence]
        for begin in range(0, count, chunk):
            end = min(begin + chunk, count)
            rows = slice(starts[sequence] + begin, starts[sequence] + end)
            batch = part_of(case.batch, sequence, begin, end)
            part = replace(case, inputs=case.inputs[rows], batch=batch)
            assert torch.equal(part.run(states), first[rows])


@dataclass(slots=True)
class ScanCase:
    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    gain: Tensor
    states: Tensor
    batch: AttentionBatch
    delta: bool
    normalize: bool
    scale: float

    @classmethod
    def random(
        cls,
        sequences: Sequence[tuple[int, int]],
        heads: tuple[int, int, int, int],
        kind: str = "deltanet",
        dtype: torch.dtype = FP32,
        seed: int | None = None,
    ) -> "ScanCase":
        generator = torch.Generator()
        generator.manual_seed(generator.seed() if seed is None else seed)
        num_groups, num_heads, key_dim, value_dim = heads
        per_channel, delta = KINDS[kind]
        batch = make_batch(sequences, random_slots(sequences, generator))
        num_tokens = int(batch.query_start[-1])
        states = torch.empty(len(sequences) + 2, num_heads, key_dim, value_dim)
        fill_states(states, batch, generator)
        sizes = [num_groups * key_dim, num_groups * key_dim, num_heads * value_dim]
        mixed = torch.randn(num_tokens, sum(sizes), generator=generator).to(dtype)
        query, key, value = mixed.split(sizes, dim=1)
        decays = (num_tokens, num_heads, key_dim) if per_channel else (num_tokens, num_heads)
        return cls(
            query=query.unflatten(1, (num_groups, key_dim)),
            key=key.unflatten(1, (num_groups, key_dim)),
            value=value.unflatten(1, (num_heads, value_dim)),
            log_decay=-torch.rand(decays, generator=generator).mul(4).exp() / 20,
            gain=torch.rand(num_tokens, num_heads, generator=generator),
            states=states,
            batch=batch,
            delta=delta,
            normalize=delta,
            scale=key_dim**-0.5,
        )

    def part(self, sequence: int, begin: int, end: int) -> "ScanCase":
        """New tokens [begin, end) of one sequence."""
        first = int(self.batch.query_start[sequence])
        rows = slice(first + begin, first + end)
        return replace(
            self,
            query=self.query[rows],
            key=self.key[rows],
            value=self.value[rows],
            log_decay=self.log_decay[rows],
            gain=self.gain[rows],
            batch=part_of(self.batch, sequence, begin, end),
        )

    def run(self, states: Tensor | None = None) -> Tensor:
        return scan(
            self.query,
            self.key,
            self.value,
            self.log_decay,
            self.gain,
            self.states.clone() if states is None else states,
            self.batch,
            scale=self.scale,
            delta=self.delta,
            normalize=self.normalize,
        )

    def reference(self, states_NHKV: Tensor) -> Tensor:
        """Float64; `states_NHKV`, float64 too, becomes what the kernel must leave."""
        shared = self.value.shape[1] // self.key.shape[1]
        query, key = (
            tensor.double().repeat_interleave(shared, 1) for tensor in (self.query, self.key)
        )
        if self.normalize:
            query, key = (
                x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key)
            )
        decay = self.log_decay.double().exp()
        decay = decay[..., None, None] if decay.dim() == 2 else decay[..., None]
        out_THV = torch.empty(self.value.shape, dtype=torch.float64)
        starts = self.batch.query_start.tolist()
        for index, slot in enumerate(self.batch.slots.tolist()):
            begin, end = starts[index], starts[index + 1]
            if begin == end:
                continue
            is_fresh = int(self.batch.context_tokens[index]) == end - begin
            state = torch.zeros_like(states_NHKV[slot]) if is_fresh else states_NHKV[slot]
            for t in range(begin, end):
                state = state * decay[t]
                change = self.value[t].double()
                if self.delta:
                    change = change - torch.einsum("hkv,hk->hv", state, key[t])
                change = change * self.gain[t, :, None].double()
                state = state + torch.einsum("hk,hv->hkv", key[t], change)
                out_THV[t] = torch.einsum("hkv,hk->hv", state, query[t] * self.scale)
            states_NHKV[slot] = state
        return out_THV

    def assert_accurate(self) -> None:
        got_states, want_states = self.states.clone(), self.states.double()
        got, want = self.run(got_states), self.reference(want_states)
        assert got.dtype == self.value.dtype
        unit = UNIT[self.value.dtype]
        torch.testing.assert_close(got.double(), want, rtol=unit, atol=unit)
        torch.testing.assert_close(
            got_states.double(), want_states, rtol=2e-5, atol=2e-5, equal_nan=True
        )


@covering(kind=[*KINDS], dtype=DTYPES, sequences=STEPS)
def test_a_scan_equals_the_reference_for_every_shape_of_step(
    sequences: list[tuple[int, int]], dtype: torch.dtype, kind: str
) -> None:
    ScanCase.random(sequences, (1, 2, 32, 64), kind, dtype).assert_accurate()


@covering(kind=[*KINDS], heads=HEADS)
def test_a_scan_equals_the_reference_for_every_shape_of_heads(
    heads: tuple[int, int, int, int], kind: str
) -> None:
    ScanCase.random([(70, 1), (50, 40), (3, 3)], heads, kind).assert_accurate()


@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_a_scan_equals_the_reference_for_any_step(data: st.DataObject) -> None:
    steps = st.tuples(st.integers(0, 5), st.integers(0, 40)).map(lambda x: (x[0] + x[1], x[1]))
    sequences = data.draw(st.lists(steps, min_size=1, max_size=4))
    groups, shared = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    dims = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 12)))
    heads = (groups, groups * shared, 8 * dims[0], 8 * dims[1])
    kind = data.draw(st.sampled_from(list(KINDS)))
    case = ScanCase.random(sequences, heads, kind, seed=data.draw(st.integers(0, 2**31)))
    case.normalize = case.delta or data.draw(st.booleans())  # else the delta rule may diverge
    case.assert_accurate()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_neither_steps_nor_threads_nor_batch_change_a_bit_of_a_scan(
    dtype: torch.dtype, kind: str
) -> None:
    case = ScanCase.random([(150, 140), (97, 97), (30, 1)], (1, 2, 40, 136), kind, dtype)
    whole = case.states.clone()
    first, *others = of_threads(case.run)
    assert torch.equal(case.run(whole), first)
    assert all(torch.equal(first, other) for other in others)
    starts = case.batch.query_start.tolist()
    for sequence, chunk in itertools.product(range(3), (1, 2, 7, 32, 45)):
        states = case.states.clone()
        count = starts[sequence + 1] - starts[sequence]
        for begin in range(0, count, chunk):
            end = min(begin + chunk, count)
            rows = slice(starts[sequence] + begin, starts[sequence] + end)
            assert torch.equal(case.part(sequence, begin, end).run(states), first[rows])
        slot = case.batch.slots[sequence]
        assert torch.equal(states[slot], whole[slot])


def assert_rounds_float32(case: ScanCase) -> Tensor:
    """States of bfloat16 give what float32 gives from the same ones, which are rounded at last."""
    narrow = case.states.bfloat16()
    wide = narrow.float()
    want, got = case.run(wide), case.run(narrow)
    assert torch.equal(got, want)
    assert torch.equal(narrow.nan_to_num(77), wide.bfloat16().nan_to_num(77))
    return narrow


@covering(kind=[*KINDS], dtype=DTYPES)
def test_states_of_bfloat16_round_those_of_float32_at_the_end_of_a_step(
    dtype: torch.dtype, kind: str
) -> None:
    for sequences in STEPS.values():
        assert_rounds_float32(ScanCase.random(sequences, (1, 2, 32, 64), kind, dtype))
    for heads in HEADS:
        assert_rounds_float32(ScanCase.random([(70, 1), (50, 40), (3, 3)], heads, kind, dtype))


def test_neither_threads_nor_batch_change_a_bit_of_states_of_bfloat16() -> None:
    case = ScanCase.random([(150, 140), (97, 97), (30, 1)], (1, 2, 40, 136), "kimi", BF16)
    case.states = case.states.bfloat16()
    whole = case.states.clone()
    first, *others = of_threads(case.run)
    assert torch.equal(case.run(whole), first)
    assert all(torch.equal(first, other) for other in others)
    starts = case.batch.query_start.tolist()
    for sequence, slot in enumerate(case.batch.slots.tolist()):
        states = case.states.clone()
        part = case.part(sequence, 0, starts[sequence + 1] - starts[sequence])
        assert torch.equal(part.run(states), first[starts[sequence] : starts[sequence + 1]])
        assert torch.equal(states[slot], whole[slot])


def test_a_state_that_decays_wholly_is_forgotten() -> None:
    case = ScanCase.random([(9, 4)], (1, 1, 16, 16))
    case.log_decay[1] = -torch.inf
    case.assert_accurate()


def test_a_step_without_tokens_changes_nothing() -> None:
    for sequences in ([], [(7, 0), (0, 0)]):
        scanned = ScanCase.random(sequences, (1, 2, 16, 24))
        convolved = ConvCase.random(sequences, 24)
        states = scanned.states.clone(), convolved.states.clone()
        assert scanned.run(states[0]).shape == (0, 2, 24)
        assert convolved.run(states[1]).shape == (0, 24)
        assert torch.equal(states[0].isnan(), scanned.states.isnan())
        assert torch.equal(states[1].isnan(), convolved.states.isnan())


def breaks(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[object], None]:
    return lambda case: setattr(case, name, change(getattr(case, name)))


def breaks_batch(name: str, values: list[int]) -> Callable[[object], None]:
    entries = torch.tensor(values, dtype=torch.int32)
    return lambda case: setattr(case, "batch", replace(case.batch, **{name: entries}))  # type: ignore[attr-defined]


BROKEN_BATCHES = [
    (breaks_batch("query_start", [0, 3, 3]), "query_start runs from 0 to 3, expected 0 to 4"),
    (breaks_batch("query_start", [0, 5, 4]), "query_start falls after entry 1"),
    (breaks_batch("query_start", [0, 4]), "query_start has size 2 in dimension 0, expected 3"),
    (breaks_batch("context_tokens", [2, 20]), "sequence 0 has 3 tokens in the step but 2 context"),
    (breaks_batch("slots", [0, 4]), r"slots\[1\] is 4, there are 4 states"),
    (breaks_batch("slots", [-1, 1]), r"slots\[0\] is -1, there are 4 states"),
    (breaks_batch("slots", [2, 2]), r"slots\[1\] is 2, as that of an earlier sequence"),
    (breaks_batch("slots", [2]), "slots has size 1 in dimension 0, expected 2"),
]
BROKEN_SCANS = [
    *BROKEN_BATCHES,
    (breaks("query", Tensor.double), "query has dtype float64, expected float32, float16"),
    (breaks("key", Tensor.half), "key has dtype float16, expected float32"),
    (breaks("query", lambda x: x[:, :1]), "query has size 1 in dimension 1, expected 2"),
    (breaks("value", lambda x: x[:, :3]), "value has 3 heads, not a multiple of key's 2"),
    (breaks("value", lambda x: x[..., :12]), "value has dimension 12, expected a multiple of 8"),
    (breaks("key", lambda x: x.repeat(1, 1, 17)), "key has dimension 272, expected .* up to 256"),
    (breaks("log_decay", Tensor.double), "log_decay has dtype float64, expected float32"),
    (breaks("gain", lambda x: x[:3]), "gain has size 3 in dimension 0, expected 4"),
    (breaks("states", lambda x: x[..., :8]), "states has size 8 in dimension 3, expected 16"),
    (breaks("states", Tensor.half), "states has dtype float16, expected float32 or bfloat16"),
    (breaks("scale", lambda _: float("nan")), "scale is nan, expected a finite number"),
]
BROKEN_CONVOLUTIONS = [
    *BROKEN_BATCHES,
    (breaks("inputs", Tensor.double), "inputs has dtype float64, expected float32, float16"),
    (breaks("weight", lambda x: x[:7]), "weight has size 7 in dimension 1, expected 24"),
    (breaks("weight", lambda x: x[:, :3]), "states has size 3 in dimension 1, expected 2"),
    (breaks("weight", lambda x: x[:, :0]), "weight has 0 taps, expected 1 to 16"),
    (breaks("bias", Tensor.bfloat16), "bias has dtype bfloat16, expected float32"),
    (breaks("states", Tensor.half), "states has dtype float16, expected float32"),
    (breaks("activation", lambda _: "gelu"), "activation is 'gelu', expected 'silu' or 'none'"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN_SCANS, ids=[x for _, x in BROKEN_SCANS])
def test_arguments_of_a_scan_that_do_not_fit_are_refused_by_name(
    change: Callable[[object], None], message: str
) -> None:
    case = ScanCase.random([(40, 3), (20, 1)], (2, 4, 16, 16))
    change(case)
    with pytest.raises(ConfigError, match=f"scan: {message}"):
        case.run()


@pytest.mark.parametrize(
    ("change", "message"), BROKEN_CONVOLUTIONS, ids=[x for _, x in BROKEN_CONVOLUTIONS]
)
def test_arguments_of_a_convolution_that_do_not_fit_are_refused_by_name(
    change: Callable[[object], None], message: str
) -> None:
    case = ConvCase.random([(40, 3), (20, 1)], 24)
    change(case)
    with pytest.raises(ConfigError, match=f"causal_conv: {message}"):
        case.run()
