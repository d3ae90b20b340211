"""What is read off a prompt instead of generating after it: log probabilities or hidden states."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from raymoe.engine.outputs import SLICE_ROWS, Int32s

if TYPE_CHECKING:
    from torch import Tensor

Float32s = npt.NDArray[np.float32]
POOLINGS = ("last", "mean", "cls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What of the rows of a prompt is wanted.

    Attributes:
        pooling: "last" and "cls" keep the row of the last or the first token, "mean" the mean of
            all. Rows are hidden states, or logits of a classification head.
        targets: Tokens that the last positions predict, one each. Where given, their log
            probabilities are wanted and `pooling` has no meaning.
    """

    pooling: str = "last"
    targets: Int32s | None = None

    def logit_positions(self, num_tokens: int) -> tuple[int, int]:
        """Begin and end of the positions whose rows are wanted; that of the last always is."""
        if self.targets is not None:
            return num_tokens - len(self.targets), num_tokens
        begin, end = {"last": (num_tokens, num_tokens), "mean": (0, num_tokens), "cls": (0, 1)}[
            self.pooling
        ]
        return begin, end


@dataclass(slots=True)
class Found:
    """What was read off one sequence so far. Each row is taken once, in any chunks.

    Attributes:
        logprobs: Of the targets.
        is_greedy: Whether each target is the most probable token.
        row: The kept row, or the sum of all rows.
    """

    reading: Reading
    num_tokens: int
    logprobs: Float32s = field(default_factory=lambda: np.zeros(0, np.float32))
    is_greedy: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    row: "Tensor | None" = None

    def __post_init__(self) -> None:
        if self.reading.targets is not None:
            count = len(self.reading.targets)
            self.logprobs, self.is_greedy = np.zeros(count, np.float32), np.zeros(count, np.bool_)

    def take(self, rows_RV: "Tensor", first: int) -> None:
        """Take the rows of tokens that follow one another, the first at position `first`."""
        if self.reading.targets is not None:
            self._score(rows_RV, first - self.num_tokens + len(self.reading.targets))
        elif self.reading.pooling == "mean":
            total = rows_RV.float().sum(0)
            self.row = total if self.row is None else self.row + total
        elif self.reading.pooling == "cls":
            if first == 0:
                self.row = rows_RV[0].float().clone()
        elif first + len(rows_RV) == self.num_tokens:
            self.row = rows_RV[-1].float().clone()

    @property
    def is_finite(self) -> bool:
        return self.row is None or bool(self.row.isfinite().all())

    def pooled(self) -> Float32s:
        """The row that `pooling` asks for, once all rows were taken."""
        assert self.row is not None, "no row was taken"
        row: Float32s = self.row.numpy().copy()
        return row / np.float32(self.num_tokens) if self.reading.pooling == "mean" else row

    def _score(self, rows_RV: "Tensor", first: int) -> None:
        import torch  # noqa: PLC0415 - a driver reads task options without torch

        assert self.reading.targets is not None
        targets = torch.tensor(self.reading.targets, dtype=torch.int64)
        for begin in range(0, len(rows_RV), SLICE_ROWS):
            logits_SV = rows_RV[begin : begin + SLICE_ROWS].float()
            part = slice(first + begin, first + begin + len(logits_SV))
            chosen_S = logits_SV.gather(1, targets[part, None])[:, 0]
            self.logprobs[part] = (chosen_S - logits_SV.logsumexp(1)).numpy()
            self.is_greedy[part] = (logits_SV.argmax(1) == targets[part]).numpy()
