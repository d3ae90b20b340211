"""A cut pass in the numbers of the cost model."""

from raymoe.engine.pace import wave_shape
from tests.unit.runtime.test_waves import cut


def test_rows_contexts_pairs_and_shares_are_counted() -> None:
    sequences = [(1, 49), (1, 9), (1, 99), (1, 0), (4, 10), (3, 0)]
    (wave,) = cut(sequences, 1, fraction=0.5).waves
    shape = wave_shape(wave)
    assert shape.decode_rows == 4
    assert shape.decode_context_tokens == 50 + 10 + 100 + 1
    assert shape.prefill_tokens == 7
    assert shape.prefill_pairs == (11 + 12 + 13 + 14) + (1 + 2 + 3)
    assert shape.logit_rows == 6
    assert shape.cpu_attention_fraction == 0.5


def test_an_empty_wave_costs_nothing() -> None:
    shape = wave_shape(cut([(1, 5)], 3).waves[2])
    assert (shape.tokens, shape.prefill_pairs, shape.logit_rows) == (0, 0, 0)
