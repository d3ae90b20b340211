"""Model sizes as the papers count them, and the hierarchical roofline of MoE-Lightning.

Assumptions:
- Weights, KV and hidden states take two bytes per element; weights one where `of` is told so.
- Layers that differ (leading dense layers, windows) are replaced by their mean.
- Shared experts and dense networks count as dense parts, like projections. Routers, norms,
  embeddings and the head are left out, as in the code of MoE-Lightning.
"""

from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple, Self

from raymoe.errors import ConfigError
from raymoe.plan.work import ModelWork, Operation
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec

BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """One model in the symbols that the papers share.

    Source: MoE-Lightning, table 1; MoE-Lens, section 5.1; MoE-Gen, table 2.
    """

    num_layers: int
    hidden_size: int  # h1 of MoE-Lightning, h of MoE-Lens
    expert_hidden: int
    num_experts: int  # n_e, N_e: per layer with experts
    top_k: int
    num_heads: int
    query_width: float  # n_q times the head size
    kv_token_bytes: float  # KV of one token in one layer
    pair_flop: float  # operations per query and context token, all heads, both products
    expert_bytes: int
    layer_expert_bytes: float  # all experts of a layer
    layer_dense_bytes: float  # everything else of a layer
    bytes_per_weight: int = BYTES_PER_ELEMENT

    @classmethod
    def of(cls, model: ModelSpec, bytes_per_weight: int = BYTES_PER_ELEMENT) -> Self:
        work = ModelWork.of(model, BYTES_PER_ELEMENT)
        sparse = [layer for layer in work.layers if layer.num_experts]
        if not sparse:
            raise ConfigError(f"{model.name} has no experts; the papers model what streams experts")
        expert = max(layer.expert.parameters for layer in sparse)
        layers = work.layers
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            expert_hidden=max(layer.expert_hidden for layer in sparse),
            num_experts=max(layer.num_experts for layer in sparse),
            top_k=max(layer.top_k for layer in sparse),
            num_heads=max(layer.attention.token_shapes.query[0] for layer in model.layers),
            query_width=fmean(layer.attention.query_width for layer in layers),
            kv_token_bytes=fmean(layer.attention.kv_token_bytes for layer in layers),
            pair_flop=fmean(layer.attention.pair_flop for layer in layers),
            expert_bytes=bytes_per_weight * expert,
            layer_expert_bytes=bytes_per_weight
            * fmean(layer.num_experts * layer.expert.parameters for layer in layers),
            layer_dense_bytes=bytes_per_weight
            * fmean(layer.attention_parameters + layer.common.parameters for layer in layers),
            bytes_per_weight=bytes_per_weight,
        )

    @property
    def expert_bytes_all(self) -> float:
        return self.num_layers * self.layer_expert_bytes

    @property
    def dense_bytes_all(self) -> float:
        return self.num_layers * self.layer_dense_bytes

    @property
    def weight_bytes(self) -> float:
        return self.expert_bytes_all + self.dense_bytes_all

    @property
    def kv_token_bytes_all(self) -> float:
        return self.num_layers * self.kv_token_bytes

    def expert_flop(self, tokens: float) -> float:
        """Operations of the experts of one layer: two per weight and token."""
        visited = tokens * self.top_k * self.layer_expert_bytes / self.num_experts
        return 2 * visited / self.bytes_per_weight

    def dense_flop(self, tokens: float) -> float:
        """Operations of everything else of one layer but attention over the context."""
        return 2 * tokens * self.layer_dense_bytes / self.bytes_per_weight


class Roof(StrEnum):
    COMPUTE = "compute"
    MEMORY = "memory"
    LINK = "link"


class Point(NamedTuple):
    flop_per_byte: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class Level:
    flop_per_s: float
    bytes_per_s: float

    def attainable(self, flop_per_byte: float) -> float:
        """Operations per second at an intensity (MoE-Lightning, equations 1, 2 and 8)."""
        return min(self.flop_per_s, self.bytes_per_s * flop_per_byte)

    def seconds(self, flop: float, num_bytes: float) -> float:
        """Time of an operation on this level (MoE-Lightning, section 4.2, before equation 14)."""
        return max(flop / self.flop_per_s, num_bytes / self.bytes_per_s)

    @property
    def turning_point(self) -> float:
        """Flop per byte from which computation limits (MoE-Lightning, section 3.1, equation 3)."""
        return self.flop_per_s / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Hierarchy:
    near: Level
    far: Level
    link_bytes_per_s: float

    @classmethod
    def of(cls, hardware: HardwareSpec) -> Self:
        return cls(
            near=Level(hardware.gpu_flop_per_s, hardware.gpu_bytes_per_s),
            far=Level(hardware.host_flop_per_s, hardware.host_bytes_per_s),
            link_bytes_per_s=hardware.htod_bytes_per_s,
        )

    def roofs(self, operation: Operation) -> dict[Roof, float]:
        """Roofs of an operation on the near level, flop/s (MoE-Lightning, equations 4 to 6)."""
        return {
            Roof.COMPUTE: self.near.flop_per_s,
            Roof.MEMORY: self.near.bytes_per_s * operation.near_intensity,
            Roof.LINK: self.link_bytes_per_s * operation.far_intensity,
        }

    def turning_point_1(self) -> Point:
        """P1: below this intensity it is better to compute where the data is.

        Compares the far level at its peak with the link. Equation 9 evaluates the far roof at the
        intensity it solves for; where host memory is faster than the link, as on all nodes, only
        the peak solves it, and elsewhere fetching always pays.

        Source: MoE-Lightning, section 3.2, equation 9; figures 4 and 5.
        """
        if self.far.bytes_per_s <= self.link_bytes_per_s:
            return Point(0.0, 0.0)
        peak = self.far.flop_per_s
        return Point(peak / self.link_bytes_per_s, peak)

    def turning_point_2(self, operation: Operation) -> Point:
        """P2: the link limits below this intensity, the near level above (equation 10)."""
        speed = self.near.attainable(operation.near_intensity)
        return Point(speed / self.link_bytes_per_s, speed)

    def balance_point(self, operation: Operation) -> Point | None:
        """Where link and device memory limit equally; None if computation limits first.

        Beyond this point only a larger micro-batch helps, not a larger batch. Source:
        MoE-Lightning, section 3.2, equation 11.
        """
        speed = self.near.bytes_per_s * operation.near_intensity
        if speed > self.near.flop_per_s:
            return None
        return Point(speed / self.link_bytes_per_s, speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOperation:
    operation: Operation
    near_flop_per_s: float  # attainable on the GPU, which fetches host data (equation 7)
    near_roof: Roof  # the roof that limits it there
    far_flop_per_s: float  # attainable on the CPU, where the data is (equation 8)
    p1: Point  # turning point of equation 9
    p2: Point  # turning point of equation 10
    balance: Point | None  # point of equation 11; None if computation limits

    @property
    def is_near_better(self) -> bool:
        return self.near_flop_per_s > self.far_flop_per_s

    @property
    def point(self) -> Point:
        """The operation at the faster of its two places."""
        speed = max(self.near_flop_per_s, self.far_flop_per_s)
        return Point(self.operation.far_intensity, speed)


def place(hierarchy: Hierarchy, operation: Operation) -> PlacedOperation:
    """Place an operation under a node's roofs (MoE-Lightning, section 3.2, equations 7 to 11)."""
    roofs = hierarchy.roofs(operation)
    lowest = min(roofs, key=lambda roof: roofs[roof])
    return PlacedOperation(
        operation=operation,
        near_flop_per_s=roofs[lowest],
        near_roof=lowest,
        far_flop_per_s=hierarchy.far.attainable(operation.far_intensity),
        p1=hierarchy.turning_point_1(),
        p2=hierarchy.turning_point_2(operation),
        balance=hierarchy.balance_point(operation),
    )


def decode_attention(
    model: PaperModel, context_tokens: float, *, kv_bits: int = 16, products: int = 2
) -> Operation:
    """Decode attention of one sequence in one layer, KV on the host, without projections.

    The intensity does not depend on the batch. Source: MoE-Lightning, section 3.3 and figure 4.

    Args:
        context_tokens: Tokens that the query attends to.
        kv_bits: Bits per element of queries, KV and output.
        products: 2, or 1 to count only queries by keys, as MoE-Lightning's code does.
    """
    softmax = 2 * model.num_heads
    flop = context_tokens * (products * model.pair_flop / 2 + softmax)
    elements = context_tokens * model.kv_token_bytes / BYTES_PER_ELEMENT + 2 * model.query_width
    num_bytes = elements * kv_bits / 8
    return Operation(
        name=f"attention at {context_tokens:.0f} tokens",
        flop=flop,
        near_bytes=num_bytes,
        far_bytes=num_bytes,
    )


def expert_ffn(
    model: PaperModel, batch_size: float, micro_batch_size: float, *, resident_fraction: float = 0.0
) -> Operation:
    """All experts of one layer for a batch that is cut into micro-batches.

    Each micro-batch reads all experts and its hidden states from device memory; the link brings
    non-resident weights once per batch.

    Args:
        batch_size: N: tokens of a step.
        micro_batch_size: mu: tokens of a launch.
        resident_fraction: r_w: share of the experts that stays on the device.

    Source: MoE-Lightning, section 3.3 and figure 5. There the far intensity also counts hidden
    states, which do not come with the weights: 0.2 % less at 128 tokens, 18 % at 16,384.
    """
    hidden = BYTES_PER_ELEMENT * (model.hidden_size + model.expert_hidden)
    launches = max(1.0, batch_size / micro_batch_size)
    return Operation(
        name=f"experts, {batch_size:.0f} tokens",
        flop=model.expert_flop(batch_size),
        near_bytes=launches * model.layer_expert_bytes + batch_size * hidden,
        far_bytes=(1 - resident_fraction) * model.layer_expert_bytes,
    )
