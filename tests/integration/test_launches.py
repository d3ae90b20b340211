"""The GPU path with kernels in Triton's interpreter: tokens of the CPU, and few launches per layer.

The emulated device takes the way of a GPU: host memory counts as memory with Triton.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from raymoe.engine import rank_model
from raymoe.kernels import elementwise, gpu_attention_batch, latent_heads
from raymoe.kernels.gpu_attention_batch import AttentionCompute
from raymoe.model import device_experts, feed_forward, loading
from raymoe.plan.policy import DevicePolicy
from raymoe.runtime.operations import StreamedMemory
from raymoe.schedule.graph import Op
from tests.integration import test_schedules as schedules

pytest.importorskip("triton")

ON_THE_GPU = (Op.PRE, Op.GATTN, Op.POST, Op.EXPERTS)
# Per layer and micro-batch, whether the host attends for some of its sequences or not.
MAX_LAUNCHES = {"mixtral": 20, "qwen3_moe": 20, "gpt_oss": 20, "deepseek_v3": 30, "qwen3_5_moe": 30}
IN_THE_DEFAULT_RUN = (("mixtral", 0.5),)
_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided")
Counts = dict[Op, list[Counter[str]]]  # of each task: calls by name


class _Calls(TorchDispatchMode):
    """Counts operations of torch that launch something, by name."""

    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode, operations come before they are taken apart
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func._schema.name.removeprefix("aten::")
        is_free = func.is_view or name in _ALLOCATIONS
        self.calls[f"view {name}" if is_free else name] += 1
        return func(*args, **kwargs)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """What each task of the GPU calls, from here on; those tasks take the way of a GPU."""
    from raymoe.kernels.gpu_common import Launch  # noqa: PLC0415 - needs Triton

    found: Counts = defaultdict(list)
    current = threading.local()
    run, bind = Launch.run, StreamedMemory.bindings.fget

    def counted_run(launch: Launch) -> None:
        current.calls[f"kernel {launch.kernel.__name__}"] += 1
        current.calls[f"view variant {variant_of(launch)}"] += 1
        if not hasattr(current, "is_compiling"):
            with _disable_current_modes():
                run(launch)

    def counted(op: Op, function: Callable[..., object]) -> Callable[..., object]:
        def task(*args: object) -> object:
            current.calls = Counter()
            with _Calls(current.calls):
                result = function(*args)
            found[op].append(current.calls)
            del current.calls
            return result

        return task

    def prepare(model: object, decoder: object, max_tokens: int, _device: object) -> None:
        current.calls, current.is_compiling = Counter(), True
        rank_model._compile(model, decoder, max_tokens, torch.device("cpu"))
        found[Op.W].append(current.calls)
        del current.calls, current.is_compiling

    def bind_and_count(memory: object) -> object:
        bound = bind(memory)
        return bound | {op: counted(op, bound[op]) for op in ON_THE_GPU}

    monkeypatch.setattr(Launch, "run", counted_run)
    monkeypatch.setattr(rank_model, "_prepare", prepare)
    monkeypatch.setattr(StreamedMemory, "bindings", property(bind_and_count))
    for module in (elementwise, feed_forward, loading, latent_heads):
        monkeypatch.setattr(module, "triton_runs_on", lambda _: hasattr(current, "calls"))
    for name in ("native_reads", "_rope_is_native", "_router_is_native"):
        is_native = getattr(elementwise, name)
        monkeypatch.setattr(
            elementwise,
            name,
            lambda *args, is_native=is_native: not hasattr(current, "calls") and is_native(*args),
        )
    compute = AttentionCompute.on((8, 0), torch.float32)
    monkeypatch.setattr(gpu_attention_batch, "attention_compute", lambda *_: compute)
    monkeypatch.setattr(device_experts, "grouped_experts_are_used", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    return found


def check(family: str, counts: Counts, fraction: float) -> None:
    name = schedules.plain_configuration(family)
    # Micro-batches begin at tokens that are no multiple of an alignment.
    prompts, params = [[3], [5, 9, 2, 8, 4], [7, 7]], {"temperature": 0, "max_tokens": 1}
    with schedules.make_engine(name, {}) as engine:
        want = [generation.token_ids for generation in engine.generate(prompts, params)]
    policy = DevicePolicy(num_micro_batches=3, cpu_attention_fraction=fraction)
    config = {"device": "emulated", "schedule": "cgopipe", "device_policy": policy}
    with schedules.make_engine(name, {}, **config) as engine:
        compiled = variants(counts)
        counts.clear()
        got = [generation.token_ids for generation in engine.generate(prompts, params)]
    assert got == want
    assert set() < variants(counts) <= compiled  # by the warm-up
    most = {op: max(counts[op], key=launches, default=Counter()) for op in ON_THE_GPU}
    lines = [
        f"{op.name}: {launches(calls)} "
        f"{ {name: n for name, n in calls.items() if 'variant' not in name} }"
        for op, calls in most.items()
    ]
    print(f"\n{family}, {fraction} on the host", *lines, sep="\n  ")  # noqa: T201
    assert sum(map(launches, most.values())) <= MAX_LAUNCHES[family], lines


def launches(calls: Counter[str]) -> int:
    return sum(count for name, count in calls.items() if not name.startswith("view "))


def variants(counts: Counts) -> set[str]:
    names = {name for tasks in counts.values() for calls in tasks for name in calls}
    return {name for name in names if name.startswith("view variant")}


def variant_of(launch: object) -> tuple[object, ...]:
    """What Triton compiles for; the kernels say of which arguments it assumes nothing."""
    options = launch.kernel.kwargs
    anything = options["do_not_specialize"] or ()
    anywhere = {*anything, *(options["do_not_specialize_on_alignment"] or ())}
    assumed = [
        (name, each.dtype, name in anywhere or each.data_ptr() % 16 == 0)
        if isinstance(each, torch.Tensor)
        else (name, each >= 2**31, name in anything or (each == 1, each % 16 == 0))
        for name, each in launch.arguments.items()
    ]
    return launch.kernel.__name__, (*launch.constants.items(), *launch.options.items()), *assumed


@pytest.mark.parametrize(
    ("family", "fraction"),
    [
        pytest.param(
            *case, marks=[] if case in IN_THE_DEFAULT_RUN else pytest.mark.slow, id=case[0]
        )
        for case in product(MAX_LAUNCHES, (0.0, 0.5))
    ],
)
def test_a_layer_of_a_micro_batch_takes_few_launches(
    family: str, fraction: float, counts: Counts
) -> None:
    check(family, counts, fraction)
