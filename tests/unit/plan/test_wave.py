"""Waves: what they hold, and how their attention is split."""

import pytest

from raymoe.errors import ConfigError
from raymoe.plan.wave import WaveShape


def test_a_decode_wave_reads_every_context_and_wants_logits_of_every_row() -> None:
    wave = WaveShape.decode(3, 100)
    assert (wave.tokens, wave.decode_context_tokens, wave.logit_rows) == (3, 300, 3)
    assert (wave.prefill_tokens, wave.prefill_pairs) == (0, 0)


def test_a_prompt_token_sees_itself_and_what_is_before_it() -> None:
    wave = WaveShape.prefill(2, 4)
    assert (wave.tokens, wave.prefill_pairs, wave.logit_rows) == (8, 2 * (1 + 2 + 3 + 4), 2)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_both_shares_of_the_attention_make_the_whole(fraction: float) -> None:
    wave = WaveShape.decode(10, 50, cpu_attention_fraction=fraction)
    assert wave.cpu_rows == pytest.approx(10 * fraction)
    assert wave.cpu_context_tokens == pytest.approx(500 * fraction)
    assert wave.cpu_rows + wave.device_rows == 10
    assert wave.cpu_context_tokens + wave.device_context_tokens == 500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("decode_rows", -1),
        ("decode_context_tokens", -1),
        ("prefill_tokens", -1),
        ("prefill_pairs", -1),
        ("logit_rows", -1),
        ("cpu_attention_fraction", 1.1),
        ("cpu_attention_fraction", -0.1),
        ("cpu_attention_fraction", float("nan")),
    ],
)
def test_shapes_without_meaning_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"WaveShape\.{field} is"):
        WaveShape(**{field: value})
