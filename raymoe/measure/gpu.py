"""Measure a CUDA device and its link: alone, both directions, and while the CPU attends."""

import itertools
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Generic, Self

import torch
from torch import Tensor

from raymoe.codecs import Weight, on_device
from raymoe.device.cuda import free_gpu_bytes
from raymoe.device.cuda_api import CudaApi, EventT, StreamT, TorchCuda
from raymoe.device.find_gpu import half_dtype
from raymoe.device.lane import ThreadLane
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_experts import Experts
from raymoe.kernels.cpu_linear import PlainLinear
from raymoe.kernels.elementwise import Projected
from raymoe.kernels.gpu_attention_batch import RaggedBatch, attention_compute
from raymoe.kernels.gpu_experts_layout import ExpertMatrices, balanced_routing
from raymoe.kernels.paged_kv import BLOCK_TOKENS, KvLayout
from raymoe.kernels.tensors import to_device
from raymoe.kernels.torch_attention import PagedBatch, append_and_attend_paged
from raymoe.measure.jobs import (
    AttentionShape,
    StateShape,
    decode_job,
    random_matrix,
    scan_job,
    shuffled_table,
)
from raymoe.measure.timing import KernelJob
from raymoe.model.device_experts import make_device_experts
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.specs.hardware import HOPPER, Curve, DeviceCurves, HardwareSpec, expert_shares
from raymoe.specs.weight_format import Fp8Block, Mxfp4, WeightFormat
from raymoe.units import GIB, MIB, ceil_div

NUM_RUNS = 5  # per measurement; the median counts

_ATTENTION = Task(op=Op.ATTN, layer=0, part=0, resource=Resource.CPU)

Call = Callable[[], object]


class StreamRun(Generic[StreamT, EventT]):
    def __init__(
        self, api: CudaApi[StreamT, EventT], stream: StreamT, calls: Iterable[Call]
    ) -> None:
        """Enqueue all calls; the device may not have started when this returns."""
        self._api = api
        self._start, self._end = api.new_event(), api.new_event()
        with api.use(stream):
            api.record(self._start, stream)
            for call in calls:
                call()
            api.record(self._end, stream)

    def seconds(self) -> float:
        self._api.wait_event(self._end)
        return self._api.elapsed_s(self._start, self._end)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCopies:
    num_bytes: int
    htod: Call
    dtoh: Call
    pageable_htod: Call
    pageable_dtoh: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    htod: float
    dtoh: float
    pageable_htod: float
    pageable_dtoh: float
    duplex_htod: float
    duplex_dtoh: float
    busy_htod: float
    busy_attention: float


def seconds_on_stream(
    api: CudaApi[StreamT, EventT], stream: StreamT, calls: Iterable[Call], seconds: float
) -> float:
    """Seconds per call; the calls alternate in runs of `seconds` in total."""
    endless = itertools.cycle(calls)
    once_s = StreamRun(api, stream, itertools.islice(endless, 2)).seconds() / 2
    count = _calls_in(seconds / NUM_RUNS, once_s)
    runs = [
        StreamRun(api, stream, itertools.islice(endless, count)).seconds() for _ in range(NUM_RUNS)
    ]
    return statistics.median(runs) / count


def measure_link(
    api: CudaApi[StreamT, EventT], copies: LinkCopies, attention: KernelJob, seconds: float
) -> LinkRates:
    """Rates of each direction alone, from pageable memory, duplex, and while the CPU attends.

    The calls of `attention` must release the interpreter's lock.
    """
    each_s = seconds / 6
    stream, other = api.new_stream(), api.new_stream()

    def rate(call: Call) -> float:
        return copies.num_bytes / seconds_on_stream(api, stream, [call], each_s)

    htod, dtoh = rate(copies.htod), rate(copies.dtoh)
    count = _calls_in(each_s / NUM_RUNS, copies.num_bytes / min(htod, dtoh))
    pairs = [
        (
            StreamRun(api, stream, [copies.htod] * count),
            StreamRun(api, other, [copies.dtoh] * count),
        )
        for _ in range(NUM_RUNS)
    ]
    with Background(attention.calls) as background:
        busy_htod = rate(copies.htod)
    return LinkRates(
        htod=htod,
        dtoh=dtoh,
        pageable_htod=rate(copies.pageable_htod),
        pageable_dtoh=rate(copies.pageable_dtoh),
        duplex_htod=copies.num_bytes * count / statistics.median(up.seconds() for up, _ in pairs),
        duplex_dtoh=copies.num_bytes * count / statistics.median(dn.seconds() for _, dn in pairs),
        busy_htod=busy_htod,
        busy_attention=attention.bytes_per_call / background.seconds_per_call,
    )


class Background:
    """Repeats calls on a CPU lane for as long as the context lasts, at least once."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._calls = itertools.cycle(calls)
        self._is_over = threading.Event()
        self.num_calls = 0

    @property
    def seconds_per_call(self) -> float:
        return (self._mark.end_s - self._mark.start_s) / self.num_calls

    def __enter__(self) -> Self:
        self._lane = ThreadLane(Resource.CPU, context=torch.inference_mode)
        self._mark = self._lane.submit(_ATTENTION, self._repeat, ())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._lane.close()
        if error is None:
            self._mark.wait()

    def _repeat(self) -> None:
        for call in self._calls:
            call()
            self.num_calls += 1
            if self._is_over.is_set():
                return


def _calls_in(seconds: float, each_s: float) -> int:
    return max(1, int(seconds / max(each_s, 1e-9)))


HIDDEN_SIZE, PROJECTED_SIZE, EXPERT_SIZE = 4096, 4096, 2048
NUM_EXPERTS, TOP_K = 8, 2
MAX_EXPERT_ROWS = 4096  # their products are kept in float32
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
MIN_WEIGHT_BYTES = 512 * MIB  # ten times the second-level cache of an H100
COPY_BYTES = 64 * MIB  # a page of weights
READ_BYTES = GIB // 2
LINK_SHARE = 0.6  # share of the time for the link
ATTENTION_BATCH, ATTENTION_CONTEXT = 128, 512
STORED_FORMATS: Mapping[int, WeightFormat] = {8: Fp8Block(), 4: Mxfp4()}
ATTENTION = AttentionShape()
CONTEXTS, PROMPTS = (128, 1024, 8192), (512, 4096)
KV_BYTES = 512 * MIB  # read by a decode step
PROMPT_TOKENS = 8192  # of a prefill step
NUM_STATES = 256  # of 2 MiB each, updated by a decode step
SMALL_EXPERT, SMALL_ROWS = 128, 2
QUICK_S, QUICK_SIZE = 2.0, 4096
HOPPER_KERNEL_SHARE = 0.66  # of cuBLAS's rate, that of our kernels in bfloat16, on an H200


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJobs:
    products: Sequence[Sequence[Call]]
    product_parameters: int
    experts: Sequence[Sequence[Call]]  # whole layers, for the first of `ROWS` per expert
    expert_parameters: int  # of all experts of a layer
    reads: Sequence[Call]  # copies within the device; each reads and writes `read_bytes`
    read_bytes: int
    stored_experts: Mapping[int, Sequence[Sequence[Call]]]  # as `experts`, by bits of a weight
    decodes: Mapping[int, KernelJob]  # by context tokens
    prefills: Mapping[int, KernelJob]  # by prompt tokens
    states: KernelJob
    small: Sequence[Call]  # a task whose kernels have next to nothing to do


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    bytes_per_s: float
    product_flop_per_s: Curve
    expert_flop_per_s: Curve
    expert_flop_per_s_of_bits: Mapping[int, Curve]
    attention_bytes_per_s: Curve
    prefill_flop_per_s: Curve
    tasks_per_s: float
    state_bytes_per_s: float


def measure_rates(api: CudaApi[StreamT, EventT], jobs: DeviceJobs, seconds: float) -> DeviceRates:
    stream = api.new_stream()
    num_curves = 2 + len(jobs.stored_experts)
    each_s = seconds / (num_curves * len(ROWS) + len(jobs.decodes) + len(jobs.prefills) + 3)

    def measure(calls: Sequence[Call]) -> float:
        StreamRun(api, stream, calls[:1]).seconds()  # compiles
        return seconds_on_stream(api, stream, calls, each_s)

    def curve(calls: Sequence[Sequence[Call]], parameters: int) -> Curve:
        times = zip(ROWS[: len(calls)], map(measure, calls), strict=True)
        return Curve(tuple((rows, 2 * rows * parameters / each) for rows, each in times))

    return DeviceRates(
        bytes_per_s=2 * jobs.read_bytes / measure(jobs.reads),
        product_flop_per_s=curve(jobs.products, jobs.product_parameters),
        expert_flop_per_s=curve(jobs.experts, jobs.expert_parameters),
        expert_flop_per_s_of_bits={
            bits: curve(calls, jobs.expert_parameters)
            for bits, calls in jobs.stored_experts.items()
        },
        attention_bytes_per_s=Curve(
            tuple((n, job.bytes_per_call / measure(job.calls)) for n, job in jobs.decodes.items())
        ),
        prefill_flop_per_s=Curve(
            tuple((n, job.flop_per_call / measure(job.calls)) for n, job in jobs.prefills.items())
        ),
        tasks_per_s=1 / measure(jobs.small),
        state_bytes_per_s=jobs.states.bytes_per_call / measure(jobs.states.calls),
    )


def measure_device(host: HardwareSpec, seconds: float, index: int = 0) -> HardwareSpec:
    """Add the numbers of a CUDA device and its link to those of its measured host."""
    api = TorchCuda(index)
    with api.thread_context():
        attention = decode_job(AttentionShape(), ATTENTION_BATCH, ATTENTION_CONTEXT)
        copies, jobs = make_copies(api.device), make_jobs(api.device)
        # The data is made on the current stream, and the streams of the runs do not wait for it.
        api.wait_stream(torch.cuda.current_stream(api.device))
        link = measure_link(api, copies, attention, LINK_SHARE * seconds)
        rates = measure_rates(api, jobs, (1 - LINK_SHARE) * seconds)
        del copies, jobs
        node = with_device(host, free_gpu_bytes(index), link, rates)
        return replace(node, has_bfloat16=half_dtype() == torch.bfloat16)


def measure_gpu_quickly(
    host: HardwareSpec, free_bytes: int, seconds: float = QUICK_S, index: int = 0
) -> HardwareSpec:
    """Add the rates of a GPU that no preset knows, without curves, to those of its host.

    Products are cuBLAS's, less what kernels in Triton leave of those on Hopper and later.
    """
    api = TorchCuda(index)
    with api.thread_context():
        dtype = half_dtype()
        copies = make_copies(api.device)
        source = torch.empty(2, READ_BYTES, dtype=torch.uint8, device=api.device)
        left, right, out = torch.ones(3, QUICK_SIZE, QUICK_SIZE, dtype=dtype, device=api.device)
        api.wait_stream(torch.cuda.current_stream(api.device))
        capability = torch.cuda.get_device_capability(api.device)
        share = HOPPER_KERNEL_SHARE if capability >= HOPPER else 1.0
        of_8_bits, of_4_bits = expert_shares(capability)
        calls: list[tuple[float, Call]] = [
            (2 * share * QUICK_SIZE**3, partial(torch.mm, left, right, out=out)),
            (2 * READ_BYTES, partial(source[0].copy_, source[1])),
            (copies.num_bytes, copies.htod),
            (copies.num_bytes, copies.dtoh),
        ]
        products, reads, htod, dtoh = quick_rates(api, calls, seconds)
        del copies, source, left, right, out, calls
        torch.cuda.empty_cache()
        return replace(
            host,
            gpu_memory_bytes=free_bytes,
            gpu_bytes_per_s=reads,
            gpu_flop_per_s=products,
            htod_bytes_per_s=htod,
            dtoh_bytes_per_s=dtoh,
            has_bfloat16=dtype == torch.bfloat16,
            expert_share_of_8_bits=of_8_bits,
            expert_share_of_4_bits=of_4_bits,
        )


def quick_rates(
    api: CudaApi[StreamT, EventT], calls: Sequence[tuple[float, Call]], seconds: float
) -> list[float]:
    """Amount per second of each call, of which a call does the amount given, one after another."""
    stream = api.new_stream()
    each_s = seconds / len(calls)
    return [amount / seconds_on_stream(api, stream, [call], each_s) for amount, call in calls]


def with_device(
    host: HardwareSpec, memory_bytes: int, link: LinkRates, rates: DeviceRates
) -> HardwareSpec:
    return replace(
        host,
        gpu_memory_bytes=memory_bytes,
        gpu_bytes_per_s=rates.bytes_per_s,
        gpu_flop_per_s=rates.product_flop_per_s.highest,
        htod_bytes_per_s=link.htod,
        dtoh_bytes_per_s=link.dtoh,
        device_curves=DeviceCurves(
            product_flop_per_s=rates.product_flop_per_s,
            expert_flop_per_s=rates.expert_flop_per_s,
            expert_flop_per_s_of_8_bits=rates.expert_flop_per_s_of_bits.get(8),
            expert_flop_per_s_of_4_bits=rates.expert_flop_per_s_of_bits.get(4),
            attention_bytes_per_s=rates.attention_bytes_per_s,
            prefill_flop_per_s=rates.prefill_flop_per_s,
            tasks_per_s=rates.tasks_per_s,
            state_bytes_per_s=rates.state_bytes_per_s,
            pageable_htod_bytes_per_s=link.pageable_htod,
            pageable_dtoh_bytes_per_s=link.pageable_dtoh,
            duplex_htod_bytes_per_s=link.duplex_htod,
            duplex_dtoh_bytes_per_s=link.duplex_dtoh,
            busy_htod_bytes_per_s=link.busy_htod,
            busy_attention_bytes_per_s=link.busy_attention,
        ),
    )


def make_copies(device: torch.device, num_bytes: int = COPY_BYTES) -> LinkCopies:
    on_device = torch.empty(2, num_bytes, dtype=torch.uint8, device=device)
    pinned = torch.zeros(2, num_bytes, dtype=torch.uint8).pin_memory()
    pageable = torch.zeros(2, num_bytes, dtype=torch.uint8)

    def copy(target: Tensor, source: Tensor) -> Call:
        return partial(target.copy_, source, non_blocking=True)

    return LinkCopies(
        num_bytes=num_bytes,
        htod=copy(on_device[0], pinned[0]),
        dtoh=copy(pinned[1], on_device[1]),
        pageable_htod=copy(on_device[0], pageable[0]),
        pageable_dtoh=copy(pageable[1], on_device[1]),
    )


def attention_job(
    device: torch.device, dtype: torch.dtype, context: int, num_new: int
) -> KernelJob:
    """The last `num_new` tokens of sequences of `context` tokens attend as in an engine."""
    shape = replace(ATTENTION, dtype=dtype)
    rows = PROMPT_TOKENS if num_new > 1 else KV_BYTES // shape.kv_bytes_per_token
    batch, blocks = ceil_div(rows, context), ceil_div(context, BLOCK_TOKENS)
    layout = KvLayout(num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=dtype)
    cache = torch.zeros(batch * blocks, *layout.block_shape, dtype=dtype, device=device)
    query, key, value = (
        torch.randn(batch * num_new, heads, shape.head_dim, device=device).to(dtype)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    step = AttentionBatch(
        query_start=torch.arange(0, batch * num_new + 1, num_new, dtype=torch.int32),
        context_tokens=torch.full((batch,), context, dtype=torch.int32),
        block_table=shuffled_table(batch, blocks),
    )
    attend = device_attention(layout, step, device, shape.head_dim)
    pairs = batch * num_new * (2 * context - num_new + 1) / 2
    return KernelJob(
        kernel="attention",
        case=f"{shape}, {batch} x {num_new} of {context}",
        calls=[partial(attend, Projected(query, key, value), cache)],
        bytes_per_call=batch * context * shape.kv_bytes_per_token,
        flop_per_call=4 * pairs * shape.num_heads * shape.head_dim,
    )


def device_attention(
    layout: KvLayout, step: AttentionBatch, device: torch.device, value_dim: int
) -> Callable[[Projected, Tensor], Tensor]:
    """What appends to a cache on the device and attends, by Triton's kernels or torch."""
    scale, compute = value_dim**-0.5, attention_compute(device, layout.dtype, value_dim)
    if compute is None:
        paged = to_device(PagedBatch.of(step, layout), device)
        return lambda projected, cache: append_and_attend_paged(
            projected, cache, paged, scale=scale
        )
    # This module imports Triton.
    from raymoe.kernels.gpu_attention import Scoring, append_and_attend_ragged  # noqa: PLC0415

    ragged = to_device(RaggedBatch.of(step, compute), device)
    return lambda projected, cache: append_and_attend_ragged(
        projected, cache, ragged, Scoring(scale=scale)
    )


def experts_layer(
    device: torch.device, dtype: torch.dtype, expert_size: int, stored: WeightFormat | None = None
) -> Experts:
    """A layer of random experts; those in stored form are the same, as drawing them takes long."""

    def weights(rows: int, columns: int) -> list[Weight]:
        if stored is not None:
            drawn = random_matrix(stored, (rows, columns))
            return [on_device(drawn, device) for _ in range(NUM_EXPERTS)]
        return [torch.randn(rows, columns, dtype=dtype, device=device) for _ in range(NUM_EXPERTS)]

    wide, high = (expert_size, HIDDEN_SIZE), (HIDDEN_SIZE, expert_size)
    matrices = ExpertMatrices(weights(*wide), weights(*wide), weights(*high))
    return make_device_experts(matrices, activation="silu", dtype=dtype)


def make_jobs(device: torch.device) -> DeviceJobs:
    """Projections and experts with random weights that exceed the device's caches."""
    dtype = half_dtype()

    def random(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    def weights(*size: int) -> list[Tensor]:
        one = random(*size)
        return [one.clone() for _ in range(ceil_div(MIN_WEIGHT_BYTES, one.nbytes))]

    def inputs_of_experts(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = ceil_div(rows * NUM_EXPERTS, TOP_K)
        routing = balanced_routing(num_tokens, NUM_EXPERTS, TOP_K, device)
        return (random(num_tokens, HIDDEN_SIZE), *routing)

    def calls_of(experts: list[Experts]) -> list[list[Call]]:
        return [
            [partial(each, *arguments) for each in experts]
            for arguments in (inputs_of_experts(rows) for rows in ROWS if rows <= MAX_EXPERT_ROWS)
        ]

    products = [PlainLinear(each, None) for each in weights(PROJECTED_SIZE, HIDDEN_SIZE)]
    expert_parameters = NUM_EXPERTS * 3 * EXPERT_SIZE * HIDDEN_SIZE

    def layers(bits: int, stored: WeightFormat | None = None) -> list[Experts]:
        count = ceil_div(MIN_WEIGHT_BYTES, expert_parameters * bits // 8)
        return [experts_layer(device, dtype, EXPERT_SIZE, stored) for _ in range(count)]

    inputs = [random(rows, HIDDEN_SIZE) for rows in ROWS]
    source = torch.empty(2, READ_BYTES, dtype=torch.uint8, device=device)
    return DeviceJobs(
        products=[[partial(each, hidden) for each in products] for hidden in inputs],
        product_parameters=PROJECTED_SIZE * HIDDEN_SIZE,
        experts=calls_of(layers(8 * dtype.itemsize)),
        expert_parameters=expert_parameters,
        stored_experts={
            bits: calls_of(layers(bits, stored)) for bits, stored in STORED_FORMATS.items()
        },
        decodes={n: attention_job(device, dtype, n, 1) for n in CONTEXTS},
        prefills={n: attention_job(device, dtype, n, n) for n in PROMPTS},
        states=scan_job(StateShape(dtype=dtype), NUM_STATES, 1, device),
        small=[partial(experts_layer(device, dtype, SMALL_EXPERT), *inputs_of_experts(SMALL_ROWS))],
        reads=[partial(source[0].copy_, source[1])],
        read_bytes=READ_BYTES,
    )
