"""Steps whose experts are divided between device and cores by a script, not by predicted times."""

import random
from collections.abc import Callable

import pytest

from raymoe.engine import rank_model
from raymoe.runtime.micro_batches import CutBatch


def choose_splits(
    monkeypatch: pytest.MonkeyPatch, choose: Callable[[int], int], seen: list[int] | None = None
) -> None:
    """Make engines take the split that `choose` gives for the number of splits, step by step."""

    def split_choice(_work: object, _node: object, steps: object) -> Callable[[CutBatch], int]:
        count = len(steps.splits)  # type: ignore[attr-defined]

        def chosen(_cut: CutBatch) -> int:
            split = choose(count)
            if seen is not None:
                seen.append(split)
            return split

        return chosen

    monkeypatch.setattr(rank_model, "split_choice", split_choice)


def random_splits(seed: int) -> Callable[[int], int]:
    return random.Random(seed).randrange
