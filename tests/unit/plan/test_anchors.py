"""Published throughputs at one policy: who is faster, by how much, and what binds."""

import pytest

from raymoe.schedule.graph import Resource
from tests.paper.anchors import Anchors, moe_lightning_anchors


@pytest.fixture(scope="module")
def anchors() -> Anchors:
    return moe_lightning_anchors()


def test_cgopipe_gains_on_flexgen_as_published(anchors: Anchors) -> None:
    """MoE-Lightning, table 5: 30.12 against 16.816 tokens/s at 36 x 14 rows."""
    assert anchors.published_ratio == pytest.approx(1.79, abs=0.005)
    assert anchors.ratio == pytest.approx(anchors.published_ratio, rel=0.15)


def test_decoding_alone_is_faster_than_the_published_end_to_end(anchors: Anchors) -> None:
    for anchor in (anchors.cgopipe, anchors.flexgen_s4):
        assert anchor.num_rows == 504
        assert anchor.tokens_per_s > anchor.published_tokens_per_s


def test_the_link_binds_cgopipe_and_idles_under_flexgen(anchors: Anchors) -> None:
    assert anchors.cgopipe.timeline.utilization(Resource.HTOD) > 0.95
    assert anchors.flexgen_s4.timeline.utilization(Resource.HTOD) < 0.9
    weights_s = 90.19e9 / 12.35e9
    assert anchors.cgopipe.timeline.makespan_s == pytest.approx(weights_s, rel=0.05)


def test_flexgen_takes_what_its_schedule_allows(anchors: Anchors) -> None:
    """Weights of a layer and KV of one micro-batch are exposed, then the longer of KV and compute.

    As `generation_loop_overlap_multi_batch` of FlexGen does it: weights at the first batch, a wait
    of the whole device behind each.
    """
    timeline = anchors.flexgen_s4.timeline
    link, num_layers, micro_batches = 12.35e9, 32, 14
    weights_s, kv_s = 90.19e9 / num_layers / link, 36 * (418 + 64) * 4096 / link
    busy_s = num_layers * (weights_s + micro_batches * kv_s)
    assert timeline.busy_s(Resource.HTOD) == pytest.approx(busy_s, rel=0.01)
    compute_s = timeline.busy_s(Resource.GPU) / (num_layers * micro_batches)
    layer_s = weights_s + kv_s + (micro_batches - 1) * max(kv_s, compute_s)
    assert timeline.makespan_s == pytest.approx(num_layers * layer_s, rel=0.02)
