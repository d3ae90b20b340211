"""Micro-batches: what they hold, and how their attention is split."""

import pytest

from raymoe.errors import ConfigError
from raymoe.plan.work import MicroBatchShape
from raymoe.specs.attention.work import AttentionShape


def test_a_decode_wave_reads_every_context_and_wants_logits_of_every_row() -> None:
    micro_batch = MicroBatchShape.decode(3, 100)
    assert micro_batch.host == AttentionShape(rows=3, decode_rows=3, pairs=300, context_tokens=300)
    assert (micro_batch.tokens, micro_batch.host.past_tokens, micro_batch.logit_rows) == (3, 297, 3)
    assert micro_batch.device == AttentionShape()


def test_a_prompt_token_sees_itself_and_what_is_before_it() -> None:
    micro_batch = MicroBatchShape.prefill(2, 4)
    assert micro_batch.device == AttentionShape(
        rows=8, prompt_pairs=2 * (1 + 2 + 3 + 4), context_tokens=8
    )
    assert (micro_batch.tokens, micro_batch.device.past_tokens, micro_batch.logit_rows) == (8, 0, 2)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_both_shares_of_the_attention_make_the_whole(fraction: float) -> None:
    micro_batch = MicroBatchShape.decode(10, 50, cpu_attention_fraction=fraction)
    assert micro_batch.host.rows == pytest.approx(10 * fraction)
    assert micro_batch.host.context_tokens == pytest.approx(500 * fraction)
    assert micro_batch.host + micro_batch.device == MicroBatchShape.decode(10, 50).host


def test_waves_add_up() -> None:
    both = MicroBatchShape.decode(3, 100, cpu_attention_fraction=0.0) + MicroBatchShape.prefill(
        2, 4
    )
    assert both.device == AttentionShape(
        rows=11, decode_rows=3, pairs=300, prompt_pairs=20, context_tokens=308
    )
    assert (both.tokens, both.logit_rows) == (11, 5)


@pytest.mark.parametrize("window", [1, 3, 40, 99, 100, 5000])
def test_a_window_hides_what_lies_further_back(window: int) -> None:
    """Counted pair by pair: three rows of 100 tokens that decode, two prompts of 60."""
    micro_batch = MicroBatchShape.decode(
        3, 100, cpu_attention_fraction=0.0
    ) + MicroBatchShape.prefill(2, 60)
    seen = micro_batch.device.within(window)
    assert seen.pairs == 3 * min(window, 100)
    assert seen.prompt_pairs == pytest.approx(2 * sum(min(window, n) for n in range(1, 61)))
    assert seen.context_tokens == seen.pairs + 2 * 60, "a prompt's own keys are read"
    assert (seen.rows, seen.decode_rows) == (3 + 2 * 60, 3)


def test_without_a_window_all_is_seen() -> None:
    share = MicroBatchShape.decode(3, 100).host
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
        MicroBatchShape(logit_rows=-1)


@pytest.mark.parametrize("fraction", [1.1, -0.1, float("nan")])
def test_a_share_is_between_nothing_and_all(fraction: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        MicroBatchShape.decode(1, 1, cpu_attention_fraction=fraction)
