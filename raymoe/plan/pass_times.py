"""How long passes of a job take: simulated at a few loads, and interpolated in between."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from raymoe.plan.load import PassLoad
from raymoe.schedule.graph import Schedule
from raymoe.schedule.timeline import Timeline


class PassModel(Protocol):
    """Knows the passes of a model on a node."""

    def schedule(self, load: PassLoad) -> Schedule:
        """The schedule of a pass."""

    def timeline(self, load: PassLoad) -> Timeline:
        """The predicted timeline of a pass."""

    def seconds(self, load: PassLoad) -> float:
        """Its length."""


Bracket = tuple[tuple[float, float], ...]
NO_CONTEXT: Bracket = ((0.0, 1.0),)


@dataclass
class PassTimes:
    """Seconds of any pass up to a largest one, interpolated between loads that are simulated.

    Attributes:
        model: Simulates.
        most_rows: Decoding sequences of the largest pass.
        most_prompt_tokens: Prompt tokens of the largest pass.
        contexts: Mean contexts of the decoding sequences at which passes are simulated, ascending.
        prompt_chunk: Prompt tokens of one sequence.
    """

    model: PassModel
    most_rows: float
    most_prompt_tokens: float
    contexts: tuple[float, ...]
    prompt_chunk: float
    _known: dict[tuple[float, float, float], float] = field(default_factory=dict)

    def __call__(self, load: PassLoad) -> float:
        """Seconds of a pass: linear in rows, context and prompt tokens between the nodes."""
        prompts = _bracket(load.prompt_tokens, _nodes(self.most_prompt_tokens))
        contexts = _bracket(load.decode_context, self.contexts) if load.decode_rows else NO_CONTEXT
        return sum(
            rows_share * context_share * prompts_share * self._node(rows, context, prompt_tokens)
            for rows, rows_share in _bracket(load.decode_rows, _nodes(self.most_rows))
            for context, context_share in contexts
            for prompt_tokens, prompts_share in prompts
        )

    def _node(self, rows: float, context: float, prompt_tokens: float) -> float:
        key = (rows, context if rows else 0.0, prompt_tokens)
        if key not in self._known:
            self._known[key] = self.model.seconds(
                PassLoad(
                    decode_rows=rows,
                    decode_context=context,
                    prompt_tokens=prompt_tokens,
                    prompt_chunk=self.prompt_chunk,
                )
            )
        return self._known[key]


def _nodes(most: float) -> tuple[float, ...]:
    """A little is far more than nothing: weights travel for a single token, too."""
    return (0.0, min(1.0, most), most / 4, most / 2, most)


def _bracket(value: float, nodes: Sequence[float]) -> Bracket:
    """The nodes around a value with their weights; beyond the last node, that node."""
    for low, high in pairwise(nodes):
        if value <= high and high > low:
            share = max(0.0, (value - low) / (high - low))
            both = ((low, 1.0 - share), (high, share))
            return tuple(end for end in both if end[1])
    return ((nodes[-1], 1.0),)
