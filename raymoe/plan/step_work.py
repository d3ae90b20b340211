"""Operations and bytes of each kind of operation of a step on the host.

Assumptions, besides those of `plan.work`:
- Activations count for what lies between matrix products, not for the products.
- Attention reads the KV of each sequence once, and reads and writes what it appends.
- Sampling reads each logit once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from raymoe.plan.work import STREAM_VISITS, LayerWork, Matrices, MicroBatchShape, ModelWork
from raymoe.specs.attention.work import AttentionShape, AttentionWork


class OperationKind(StrEnum):
    """A kind of operation of a job; those that compute come first.

    Attention appends to the KV cache: on the CPU one kernel does both. Other networks are dense
    ones and shared experts.
    """

    EXPERTS = "experts"
    NETWORKS = "other networks"
    ATTENTION = "attention and append"
    STATES = "recurrent states"
    PROJECTIONS = "projections"
    ROUTER = "router and top-k"
    ELEMENTWISE = "norms and elementwise"
    HEAD = "head"
    EMBEDDING = "embedding"
    SAMPLING = "sampling"
    SCHEDULER = "scheduler"
    REST_OF_STEP = "rest of the step"
    WAITING = "waiting between steps"


@dataclass(frozen=True, slots=True)
class Work:
    """Operations, and bytes of memory that are read or written at least once."""

    flop: float = 0.0
    num_bytes: float = 0.0

    def seconds(self, *, flop_per_s: float, bytes_per_s: float) -> float:
        """The longer of operations and bytes at these rates."""
        return max(self.flop / flop_per_s, self.num_bytes / bytes_per_s)


StepWork = Mapping[OperationKind, Sequence[Work]]


def step_work(
    work: ModelWork, shape: MicroBatchShape, activated: Mapping[int, float] | None = None
) -> StepWork:
    """The work of a step by kind of operation: one entry per layer, or one for the step.

    Args:
        shape: What the host attends to.
        activated: Distinct experts that the tokens chose, by layer; what is expected of independent
            choices in others.
    """
    found: dict[OperationKind, list[Work]] = {kind: [] for kind in OperationKind}
    for i, layer in enumerate(work.layers):
        number = layer.activated_experts(shape.tokens)
        if activated is not None:
            number = activated.get(i, number)
        for kind, each in _layer_work(work, layer, shape, number):
            found[kind].append(each)
    rows = shape.logit_rows
    logits = work.logit_bytes(rows)
    found[OperationKind.EMBEDDING].append(Work(0.0, work.embedding_bytes(shape.tokens)))
    if rows:
        head = Work(rows * work.head_flop, work.head.num_bytes + logits)
        found[OperationKind.HEAD].append(head)
        found[OperationKind.SAMPLING].append(Work(0.0, logits))
    return {kind: entries for kind, entries in found.items() if entries}


def _layer_work(
    work: ModelWork, layer: LayerWork, shape: MicroBatchShape, activated: float
) -> Iterable[tuple[OperationKind, Work]]:
    tokens = shape.tokens
    projections = _product(tokens, layer.pre.plus(layer.post))
    if layer.mixers.parameters:  # three products with a half of them
        mixers = Work(3 * tokens * layer.mixers.parameters, layer.mixers.num_bytes)
        projections = _sum(projections, mixers)
    yield OperationKind.PROJECTIONS, projections
    if layer.attention.is_scan:
        states = Work(
            shape.host.rows * layer.attention.token_flop,
            2 * shape.host.decode_rows * layer.attention.state_bytes,
        )
        yield OperationKind.STATES, states
    else:
        yield OperationKind.ATTENTION, _attention(layer.attention, shape.host)
    if layer.num_experts:
        yield OperationKind.ROUTER, _product(tokens, layer.router)
        flop = 2 * tokens * layer.top_k * layer.expert.parameters
        yield OperationKind.EXPERTS, Work(flop, activated * layer.expert.num_bytes)
    if layer.common.parameters:
        yield OperationKind.NETWORKS, _product(tokens, layer.common)
    moved = work.before_attention_bytes(layer, tokens) + work.after_attention_bytes(tokens)
    moved += work.after_ffn_bytes(tokens)
    if layer.mixers.parameters:
        moved += work.mixing_bytes(tokens, sum(STREAM_VISITS))
    yield OperationKind.ELEMENTWISE, Work(0.0, moved)


def _product(tokens: float, weights: Matrices) -> Work:
    return Work(2 * tokens * weights.parameters, weights.num_bytes)


def _sum(one: Work, other: Work) -> Work:
    return Work(one.flop + other.flop, one.num_bytes + other.num_bytes)


def _attention(work: AttentionWork, share: AttentionShape) -> Work:
    """To attend within the window or to chosen tokens, and to choose these."""
    choice = work.choice
    if choice is None or (attended := share.within(choice.num_chosen)) == share:
        found = work.of(share.within(work.window))
        return Work(found.flop, found.read_bytes + found.appended_bytes)
    found = work.when_choosing.of(attended)
    unread = share.context_tokens - attended.context_tokens
    return Work(
        found.flop + choice.pair_flop * (share.pairs + share.prompt_pairs),
        found.read_bytes + found.appended_bytes + choice.token_bytes * unread,
    )
