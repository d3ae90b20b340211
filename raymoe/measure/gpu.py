"""What a GPU and its link reach, as torch's CUDA calls on one device.

Only the functions that make data name torch.cuda's memory; streams and events are behind `CudaApi`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from raymoe.device.cuda_api import CudaApi, EventT, StreamT, TorchCuda
from raymoe.kernels.cpu_experts import PlainGatedFfn
from raymoe.kernels.cpu_linear import PlainLinear
from raymoe.measure.attention import AttentionShape, decode_job
from raymoe.measure.streams import Call, LinkCopies, LinkRates, measure_link, seconds_on_stream
from raymoe.specs.hardware import Curve, DeviceCurves, HardwareSpec
from raymoe.units import GIB, MIB, ceil_div

HIDDEN_SIZE, PROJECTED_SIZE, EXPERT_SIZE = 4096, 4096, 2048
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
MIN_WEIGHT_BYTES = 512 * MIB  # ten times the second-level cache of an H100
COPY_BYTES = 64 * MIB  # a page of weights
READ_BYTES = GIB // 2
LINK_SHARE = 0.6  # of the time
ATTENTION_BATCH, ATTENTION_CONTEXT = 128, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJobs:
    """Calls to be enqueued on a stream, and what one of them works on.

    Attributes:
        products: Of each number of `ROWS`, projections of `product_parameters` each.
        experts: Of each number of `ROWS`, experts of `expert_parameters` each.
        reads: Copies within the device; each reads `read_bytes` and writes as many.
    """

    products: Sequence[Sequence[Call]]
    product_parameters: int
    experts: Sequence[Sequence[Call]]
    expert_parameters: int
    reads: Sequence[Call]
    read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What a device reaches by itself: bytes of its memory, operations over rows."""

    bytes_per_s: float
    product_flop_per_s: Curve
    expert_flop_per_s: Curve


def measure_rates(api: CudaApi[StreamT, EventT], jobs: DeviceJobs, seconds: float) -> DeviceRates:
    """Run all jobs, one after another, in about `seconds`."""
    stream = api.new_stream()
    each_s = seconds / (2 * len(ROWS) + 1)

    def measure(calls: Sequence[Call]) -> float:
        return seconds_on_stream(api, stream, calls, each_s)

    def curve(calls: Sequence[Sequence[Call]], parameters: int) -> Curve:
        times = zip(ROWS, map(measure, calls), strict=True)
        return Curve(tuple((rows, 2 * rows * parameters / each) for rows, each in times))

    return DeviceRates(
        bytes_per_s=2 * jobs.read_bytes / measure(jobs.reads),
        product_flop_per_s=curve(jobs.products, jobs.product_parameters),
        expert_flop_per_s=curve(jobs.experts, jobs.expert_parameters),
    )


def measure_device(host: HardwareSpec, seconds: float, index: int = 0) -> HardwareSpec:
    """Add the numbers of a CUDA device and its link to those of its host.

    Args:
        host: Measured already; the kernels use its threads.
        seconds: For all of it, about.
        index: Of the device.
    """
    api = TorchCuda(index)
    with api.thread_context():
        attention = decode_job(AttentionShape(), ATTENTION_BATCH, ATTENTION_CONTEXT)
        copies, jobs = make_copies(api.device), make_jobs(api.device)
        # The data is made on the current stream, for which the streams of the runs do not wait.
        api.wait_stream(torch.cuda.current_stream(api.device))
        link = measure_link(api, copies, attention, LINK_SHARE * seconds)
        rates = measure_rates(api, jobs, (1 - LINK_SHARE) * seconds)
        _, memory_bytes = torch.cuda.mem_get_info(api.device)
        return with_device(host, memory_bytes, link, rates)


def with_device(
    host: HardwareSpec, memory_bytes: int, link: LinkRates, rates: DeviceRates
) -> HardwareSpec:
    """The node made of a host, a link and a device."""
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
            pageable_htod_bytes_per_s=link.pageable_htod,
            pageable_dtoh_bytes_per_s=link.pageable_dtoh,
            duplex_htod_bytes_per_s=link.duplex_htod,
            duplex_dtoh_bytes_per_s=link.duplex_dtoh,
            busy_htod_bytes_per_s=link.busy_htod,
            busy_attention_bytes_per_s=link.busy_attention,
        ),
    )


def make_copies(device: torch.device) -> LinkCopies:
    """Copies between the device and host memory, pinned and not."""
    on_device = torch.empty(2, COPY_BYTES, dtype=torch.uint8, device=device)
    pinned = torch.zeros(2, COPY_BYTES, dtype=torch.uint8).pin_memory()
    pageable = torch.zeros(2, COPY_BYTES, dtype=torch.uint8)

    def copy(target: Tensor, source: Tensor) -> Call:
        return partial(target.copy_, source, non_blocking=True)

    return LinkCopies(
        num_bytes=COPY_BYTES,
        htod=copy(on_device[0], pinned[0]),
        dtoh=copy(pinned[1], on_device[1]),
        pageable_htod=copy(on_device[0], pageable[0]),
        pageable_dtoh=copy(pageable[1], on_device[1]),
    )


def make_jobs(device: torch.device) -> DeviceJobs:
    """Projections and experts with random weights that no cache of the device holds."""
    dtype = (
        torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.half
    )

    def random(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    def weights(*size: int) -> list[Tensor]:
        one = random(*size)
        return [one.clone() for _ in range(ceil_div(MIN_WEIGHT_BYTES, one.nbytes))]

    products = [PlainLinear(each, None) for each in weights(PROJECTED_SIZE, HIDDEN_SIZE)]
    experts = [
        PlainGatedFfn(gate, up, down.T, activation="silu")
        for gate, up, down in zip(
            *(weights(EXPERT_SIZE, HIDDEN_SIZE) for _ in range(3)), strict=True
        )
    ]
    inputs = [random(rows, HIDDEN_SIZE) for rows in ROWS]
    source = torch.empty(2, READ_BYTES, dtype=torch.uint8, device=device)
    return DeviceJobs(
        products=[[partial(each, hidden) for each in products] for hidden in inputs],
        product_parameters=PROJECTED_SIZE * HIDDEN_SIZE,
        experts=[[partial(each, hidden) for each in experts] for hidden in inputs],
        expert_parameters=3 * EXPERT_SIZE * HIDDEN_SIZE,
        reads=[partial(source[0].copy_, source[1])],
        read_bytes=READ_BYTES,
    )
