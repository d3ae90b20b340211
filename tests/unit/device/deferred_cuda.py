"""A CUDA device without a GPU that computes: torch operations in a stream happen later, or lazily.

`FakeCuda` decides when the work of a stream is done; here torch's own operations become such work.
What a lane computes in its stream is enqueued with its result allocated at once, as on a GPU, so
whoever reads without waiting reads garbage. What makes the host wait on a GPU (a number, a list, a
copy to the host) waits here too. Memory is that of the host: an operation on tensors of two devices
is not noticed; `test_device_types` looks for those.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from raymoe.device.cuda import CudaDevice
from raymoe.device.emulated import EmulatedDevice
from raymoe.engine import load, rank_model
from raymoe.kernels import compressed, elementwise, gated_streams, streams
from tests.unit.device.fake_cuda import FakeCuda, FakeStream
from tests.unit.device.native_threads import native_thread_names

HOST_WAITS = (
    Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__,
)  # fmt: skip
ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")


class DeferredCuda(FakeCuda):
    """See the module."""

    device = torch.device("cpu")
    memory_bytes = 1 << 40

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.allocated: list[int] = []

    def thread_context(self) -> AbstractContextManager[object]:
        return self._deferring()

    def allocate(self, num_bytes: int) -> Tensor:
        self.allocated.append(num_bytes)
        if sum(self.allocated) > self.memory_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(num_bytes, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> None:
        self.allocate(num_bytes)

    @property
    def num_batches(self) -> int:
        return sum(len(copies) > 1 for copies in self.copies)

    def synchronize(self) -> None:
        self.wait_here()

    def register(self, address: int, num_bytes: int) -> str | None:
        return None

    def unregister(self, address: int) -> None:
        pass

    @property
    def is_in_stream(self) -> bool:
        return getattr(self._current, "stream", None) is not None

    def wait_here(self) -> None:
        """Let the current stream of the calling thread catch up."""
        if self.is_in_stream:
            self.wait_stream(self._current.stream)

    def _step(self, stream: FakeStream) -> None:
        caller = getattr(self._current, "stream", None)
        self._current.stream = None  # the device works, whichever thread makes it
        with torch.inference_mode():
            super()._step(stream)
        self._current.stream = caller

    @contextmanager
    def _deferring(self) -> Iterator[None]:
        with torch.inference_mode(), _HostWaits(self), _Deferred(self):
            yield


class BreakableCuda(DeferredCuda):
    """A device that refuses everything once it has failed, as after an illegal address."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.registered: set[int] = set()

    def fail(self, message: str) -> None:
        self._fault = ValueError(message)

    def register(self, address: int, num_bytes: int) -> str | None:
        self.registered.add(address)
        return None

    def unregister(self, address: int) -> None:
        self.registered.remove(address)
        if self._fault is not None:
            raise RuntimeError(f"CUDA error: {self._fault}")


def lane_threads() -> list[str]:
    """Names of the threads of lanes, native ones too, as Linux cuts them."""
    names = native_thread_names()
    names += [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("raymoe-lane")]


class _HostWaits(TorchFunctionMode):
    def __init__(self, cuda: DeferredCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in HOST_WAITS:
            self._cuda.wait_here()
        return func(*args, **(kwargs or {}))


class _Deferred(TorchDispatchMode):
    def __init__(self, cuda: DeferredCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        if (
            self._cuda.is_in_stream
        ):  # in inference mode, operations come before they are taken apart
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if not self._cuda.is_in_stream or func.is_view or schema.name in ALLOCATIONS:
            return func(*args, **kwargs)
        if schema.is_mutable:
            self._cuda.launch(lambda: func(*args, **kwargs))
            return kwargs["out"] if "out" in kwargs else args[0]
        try:
            shapes = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
            results = func(*shapes[0], **shapes[1])
        except (NotImplementedError, RuntimeError):  # the shape of the result is in the data
            self._cuda.wait_here()
            return func(*args, **kwargs)
        return self._later(func, args, kwargs, results)

    def _later(self, func, args, kwargs, shapes):
        results = tree_map_only(Tensor, _garbage_like, shapes)

        def compute() -> None:
            for value, place in zip(_listed(func(*args, **kwargs)), _listed(results), strict=True):
                if isinstance(place, Tensor):
                    place.copy_(value)

        self._cuda.launch(compute)
        return results


def _listed(values: object) -> list[object]:
    return list(values) if isinstance(values, (tuple, list)) else [values]


def _garbage_like(shape: Tensor) -> Tensor:
    garbage = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
    EmulatedDevice.poison(garbage)
    return garbage


def leave_streams_alone(patch: pytest.MonkeyPatch, devices: list[DeferredCuda]) -> None:
    """Keep kernels of the host from the tensors of these devices' streams, as on a GPU."""
    places = [
        (module, "native_reads") for module in (elementwise, streams, gated_streams, compressed)
    ]
    places += [(elementwise, "_rope_is_native"), (elementwise, "_router_is_native")]
    for module, name in places:
        is_native = getattr(module, name)

        def on_host(*args: object, is_native=is_native) -> bool:
            return not any(cuda.is_in_stream for cuda in devices) and is_native(*args)

        patch.setattr(module, name, on_host)


@pytest.fixture
def without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> list[DeferredCuda]:
    """Devices whose streams kernels of the host leave alone; tests add theirs."""
    devices: list[DeferredCuda] = []
    leave_streams_alone(monkeypatch, devices)
    return devices


def use_device(monkeypatch: pytest.MonkeyPatch, open_cuda: Callable[..., CudaDevice]) -> None:
    """Give engines this device in the place of a GPU."""
    monkeypatch.setattr(load, "_check_gpu", lambda *_: None)
    monkeypatch.setattr(rank_model, "open_cuda", open_cuda)
