"""Waves: what they hold, and how their attention is split."""

import pytest

from raymoe.errors import ConfigError
from raymoe.plan.work import AttentionShape, WaveShape


def test_a_decode_wave_reads_every_context_and_wants_logits_of_every_row() -> None:
    wave = WaveShape.decode(3, 100)
    assert wave.host == AttentionShape(rows=3, decode_rows=3, pairs=300, context_tokens=300)
    assert (wave.tokens, wave.host.past_tokens, wave.logit_rows) == (3, 297, 3)
    assert wave.device == AttentionShape()


def test_a_prompt_token_sees_itself_and_what_is_before_it() -> None:
    wave = WaveShape.prefill(2, 4)
    assert wave.device == AttentionShape(rows=8, prompt_pairs=2 * (1 + 2 + 3 + 4), context_tokens=8)
    assert (wave.tokens, wave.device.past_tokens, wave.logit_rows) == (8, 0, 2)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_both_shares_of_the_attention_make_the_whole(fraction: float) -> None:
    wave = WaveShape.decode(10, 50, cpu_attention_fraction=fraction)
    assert wave.host.rows == pytest.approx(10 * fraction)
    assert wave.host.context_tokens == pytest.approx(500 * fraction)
    assert wave.host + wave.device == WaveShape.decode(10, 50).host


def test_waves_add_up() -> None:
    both = WaveShape.decode(3, 100, cpu_attention_fraction=0.0) + WaveShape.prefill(2, 4)
    assert both.device == AttentionShape(
        rows=11, decode_rows=3, pairs=300, prompt_pairs=20, context_tokens=308
    )
    assert (both.tokens, both.logit_rows) == (11, 5)


@pytest.mark.parametrize("window", [1, 3, 40, 99, 100, 5000])
def test_a_window_hides_what_lies_further_back(window: int) -> None:
    """Counted pair by pair: three rows of 100 tokens that decode, two prompts of 60."""
    wave = WaveShape.decode(3, 100, cpu_attention_fraction=0.0) + WaveShape.prefill(2, 60)
    seen = wave.device.within(window)
    assert seen.pairs == 3 * min(window, 100)
    assert seen.prompt_pairs == pytest.approx(2 * sum(min(window, n) for n in range(1, 61)))
    assert seen.context_tokens == seen.pairs + 2 * 60, "a prompt's own keys are read"
    assert (seen.rows, seen.decode_rows) == (3 + 2 * 60, 3)


def test_without_a_window_all_is_seen() -> None:
    share = WaveShape.decode(3, 100).host
    assert share.within(None) == share.within(100) == share


@pytest.mark.parametrize(
    "field", ["rows", "decode_rows", "pairs", "prompt_pairs", "context_tokens"]
)
def test_negative_counts_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"AttentionShape\.{field} is -1"):
        AttentionShape(**{field: -1})


def test_shapes_without_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than the 5 new tokens"):
        AttentionShape(rows=5, context_tokens=4)
    with pytest.raises(ConfigError, match=r"logit_rows is -1"):
        WaveShape(logit_rows=-1)


@pytest.mark.parametrize("fraction", [1.1, -0.1, float("nan")])
def test_a_share_is_between_nothing_and_all(fraction: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        WaveShape.decode(1, 1, cpu_attention_fraction=fraction)
