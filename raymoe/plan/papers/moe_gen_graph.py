"""MoE-Gen: the graph of a pass, module by module, and its critical path.

Source: MoE-Gen (2025), section 4.4 and figure 6.

Assumptions:
- Copies to the device keep one order: what is not an expert, KV, experts, layer by layer. Copies to
  the host hide behind the rest.
- Experts run one after the other (section 4.2), each behind its copy; all chosen or not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

KV_BUFFERS = 2
# The first layers fill the pipeline; from here on each takes as long as the last.
WALKED_LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes:
    """Seconds of the nodes of one layer.

    Source: MoE-Gen, section 4.4, figure 6.

    Attributes:
        dense_copy: What is not an expert, to the device.
        pre: What comes before attention.
        kv_copy: KV of each attention launch, to the device.
        device_attention: Each attention launch.
        cpu_attention: Attention of the CPU's rows.
        post: What comes after attention, router included.
        expert_copy: One expert, to the device.
        expert: One expert, all of its launches.
    """

    dense_copy: float
    pre: float
    kv_copy: tuple[float, ...]
    device_attention: tuple[float, ...]
    cpu_attention: float
    post: float
    expert_copy: float
    expert: float


@dataclass(slots=True)
class _Graph:
    """A graph that is built in topological order, and the earliest end of each node."""

    ends: list[float] = field(default_factory=list)

    def add(self, cost: float, *after: int) -> int:
        """Add a node behind others.

        Source: MoE-Gen, section 4.4, equation 4.
        """
        self.ends.append(max((self.ends[node] for node in after), default=0.0) + cost)
        return len(self.ends) - 1


def critical_path_s(
    times: ModuleTimes, *, num_layers: int, num_experts: int, expert_slots: int
) -> float:
    """Seconds of a pass: the longest path through its nodes, each processor one at a time.

    Source: MoE-Gen, section 4.4, figure 6 and equation 4; section 4.2 for the buffers.
    """
    ends = list(_layer_ends(times, min(num_layers, WALKED_LAYERS), num_experts, expert_slots))
    if num_layers <= WALKED_LAYERS:
        return ends[-1]
    return ends[-1] + (num_layers - WALKED_LAYERS) * (ends[-1] - ends[-2])


def _layer_ends(
    times: ModuleTimes, num_layers: int, num_experts: int, expert_slots: int
) -> Iterator[float]:
    """When the last expert of each layer is done.

    A copy waits for the one before and for its buffer: what is not an expert has one, free behind
    `post`.
    """
    graph = _Graph()
    link = gpu = cpu = post = graph.add(0.0)
    attended: list[int] = []
    experts: list[int] = []
    for _ in range(num_layers):
        link = graph.add(times.dense_copy, link, post)
        gpu = graph.add(times.pre, gpu, link)
        cpu = graph.add(times.cpu_attention, cpu, gpu)
        for copy_s, attention_s in zip(times.kv_copy, times.device_attention, strict=True):
            link = graph.add(copy_s, link, *_that_frees(KV_BUFFERS, attended))
            gpu = graph.add(attention_s, gpu, link)
            attended.append(gpu)
        gpu = post = graph.add(times.post, gpu, cpu)
        for _ in range(num_experts):
            link = graph.add(times.expert_copy, link, *_that_frees(expert_slots, experts))
            gpu = graph.add(times.expert, gpu, link)
            experts.append(gpu)
        yield graph.ends[gpu]


def _that_frees(num_buffers: int, readers: list[int]) -> list[int]:
    """The node that frees a buffer for the next copy, if they are all in use."""
    return [readers[-num_buffers]] if len(readers) >= num_buffers else []
