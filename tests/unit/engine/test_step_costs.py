"""A cut pass in the numbers of the cost model."""

from raymoe.engine.step_costs import micro_batch_shape
from raymoe.specs.attention.work import AttentionShape
from tests.unit.runtime.test_micro_batches import cut


def test_new_tokens_pairs_and_contexts_are_counted_by_side() -> None:
    sequences = [(1, 49), (1, 9), (1, 99), (1, 0), (4, 10), (3, 0)]
    (micro_batch,) = cut(sequences, 1, fraction=0.5).micro_batches
    shape = micro_batch_shape(micro_batch)
    prompts = AttentionShape(
        rows=7, prompt_pairs=(11 + 12 + 13 + 14) + (1 + 2 + 3), context_tokens=14 + 3
    )
    assert shape.host.rows == shape.device.rows - prompts.rows == 2
    both = shape.host + shape.device
    assert both.pairs == 50 + 10 + 100 + 1
    assert both.prompt_pairs == prompts.prompt_pairs
    assert both.context_tokens == prompts.context_tokens + 50 + 10 + 100 + 1
    assert shape.device.past_tokens >= prompts.past_tokens == 10
    assert shape.logit_rows == 6


def test_an_empty_wave_costs_nothing() -> None:
    shape = micro_batch_shape(cut([(1, 5)], 3).micro_batches[2])
    assert (shape.tokens, shape.device.pairs, shape.logit_rows) == (0, 0, 0)
