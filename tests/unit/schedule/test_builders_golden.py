"""Issue order of each builder on each lane, as read off its paper."""

import pytest

from raymoe.schedule.builders import STREAMING_BUILDERS
from tests.unit.schedule.forms import form_for

CGOPIPE = """\
gpu : pre[0,0] pre[0,1] pre[0,2] post[0,0] experts[0,0] pre[1,0] post[0,1] experts[0,1] pre[1,1] \
post[0,2] experts[0,2] pre[1,2] post[1,0] experts[1,0] post[1,1] experts[1,1] post[1,2] \
experts[1,2] head[2,0]
cpu : embed[0,0] embed[0,1] embed[0,2] attn[0,0] attn[0,1] attn[0,2] attn[1,0] attn[1,1] attn[1,2]
htod: up[0,0] up[0,1] up[0,2] hid[0,0] w[1,0] hid[0,1] w[1,1] hid[0,2] w[1,2] hid[1,0] w[0,0] \
hid[1,1] w[0,1] hid[1,2] w[0,2]
dtoh: qkv[0,0] qkv[0,1] qkv[0,2] qkv[1,0] qkv[1,1] qkv[1,2]"""

VSLPIPE = """\
gpu : pre[0,0] pre[0,1] post[0,0] experts[0,0] pre[1,0] post[0,1] experts[0,1] pre[1,1] \
post[1,0] experts[1,0] post[1,1] experts[1,1] head[2,0]
cpu : embed[0,0] embed[0,1] attn[0,0] attn[0,1] attn[1,0] attn[1,1]
htod: up[0,0] up[0,1] hid[0,0] w[1,0] w[1,1] hid[0,1] w[1,2] hid[1,0] w[0,0] w[0,1] hid[1,1] w[0,2]
dtoh: qkv[0,0] qkv[0,1] qkv[1,0] qkv[1,1]"""

MODULE_BATCHING = """\
gpu : pre[0,0] pre[0,1] pre[0,2] post[0,0] post[0,1] post[0,2] experts[0,0] pre[1,0] pre[1,1] \
pre[1,2] post[1,0] post[1,1] post[1,2] experts[1,0] head[2,0]
cpu : embed[0,0] embed[0,1] embed[0,2] attn[0,0] attn[0,1] attn[0,2] attn[1,0] attn[1,1] attn[1,2]
htod: up[0,0] up[0,1] up[0,2] hid[0,0] w[1,0] hid[0,1] w[1,1] hid[0,2] w[1,2] hid[1,0] w[0,0] \
hid[1,1] w[0,1] hid[1,2] w[0,2]
dtoh: qkv[0,0] qkv[0,1] qkv[0,2] qkv[1,0] qkv[1,1] qkv[1,2]"""

FASTDECODE = """\
gpu : pre[0,0] pre[0,1] post[0,0] experts[0,0] pre[0,2] post[0,1] experts[0,1] pre[1,0] post[0,2] \
experts[0,2] pre[1,1] post[1,0] experts[1,0] pre[1,2] post[1,1] experts[1,1] post[1,2] \
experts[1,2] head[2,0]
cpu : embed[0,0] embed[0,1] embed[0,2] attn[0,0] attn[0,1] attn[0,2] attn[1,0] attn[1,1] attn[1,2]
htod: up[0,0] up[0,1] up[0,2] hid[0,0] w[1,0] w[1,1] w[1,2] hid[0,1] hid[0,2] hid[1,0] w[0,0] \
w[0,1] w[0,2] hid[1,1] hid[1,2]
dtoh: qkv[0,0] qkv[0,1] qkv[0,2] qkv[1,0] qkv[1,1] qkv[1,2]"""

FLEXGEN_S3 = """\
gpu : pre[0,0] post[0,0] experts[0,0] sync[0,0] pre[0,1] post[0,1] experts[0,1] sync[0,1] \
pre[0,2] post[0,2] experts[0,2] sync[0,2] pre[1,0] post[1,0] experts[1,0] sync[1,0] pre[1,1] \
post[1,1] experts[1,1] sync[1,1] pre[1,2] post[1,2] experts[1,2] sync[1,2] head[2,0]
cpu : embed[0,0] embed[0,1] embed[0,2] attn[0,0] attn[0,1] attn[0,2] attn[1,0] attn[1,1] attn[1,2]
htod: up[0,0] up[0,1] up[0,2] w[1,0] w[1,1] w[1,2] hid[0,0] hid[0,1] hid[0,2] w[0,0] w[0,1] \
w[0,2] hid[1,0] hid[1,1] hid[1,2]
dtoh: qkv[0,0] qkv[0,1] qkv[0,2] qkv[1,0] qkv[1,1] qkv[1,2]"""

FLEXGEN_S4 = """\
gpu : pre[0,0] gattn[0,0] post[0,0] experts[0,0] sync[0,0] pre[0,1] gattn[0,1] post[0,1] \
experts[0,1] sync[0,1] pre[0,2] gattn[0,2] post[0,2] experts[0,2] sync[0,2] pre[1,0] gattn[1,0] \
post[1,0] experts[1,0] sync[1,0] pre[1,1] gattn[1,1] post[1,1] experts[1,1] sync[1,1] pre[1,2] \
gattn[1,2] post[1,2] experts[1,2] sync[1,2] head[2,0]
cpu : embed[0,0] embed[0,1] embed[0,2] append[0,0] append[0,1] append[0,2] append[1,0] \
append[1,1] append[1,2]
htod: up[0,0] up[0,1] up[0,2] kv[0,0] w[1,0] w[1,1] w[1,2] kv[0,1] kv[0,2] kv[1,0] w[0,0] w[0,1] \
w[0,2] kv[1,1] kv[1,2]
dtoh: qkv[0,0] qkv[0,1] qkv[0,2] qkv[1,0] qkv[1,1] qkv[1,2]"""

LAYER_BY_LAYER = """\
gpu : pre[0,0] post[0,0] experts[0,0] pre[0,1] post[0,1] experts[0,1] pre[0,2] post[0,2] \
experts[0,2] sync[0,0] sync[0,1] pre[1,0] post[1,0] experts[1,0] pre[1,1] post[1,1] experts[1,1] \
pre[1,2] post[1,2] experts[1,2] sync[1,0] sync[1,1] head[2,0]
cpu : embed[0,0] embed[0,1] embed[0,2] attn[0,0] attn[0,1] attn[0,2] attn[1,0] attn[1,1] attn[1,2]
htod: up[0,0] up[0,1] up[0,2] hid[0,0] hid[0,1] hid[0,2] w[1,0] w[1,1] w[1,2] hid[1,0] hid[1,1] \
hid[1,2] w[0,0] w[0,1] w[0,2]
dtoh: qkv[0,0] qkv[0,1] qkv[0,2] qkv[1,0] qkv[1,1] qkv[1,2]"""

GOLDEN = {
    "cgopipe": CGOPIPE,
    "vslpipe": VSLPIPE,
    "module_batching": MODULE_BATCHING,
    "fastdecode": FASTDECODE,
    "flexgen_s3": FLEXGEN_S3,
    "flexgen_s4": FLEXGEN_S4,
    "layer_by_layer": LAYER_BY_LAYER,
}


def test_every_builder_has_its_order_written_down() -> None:
    assert {*GOLDEN, "micro_batches"} == set(STREAMING_BUILDERS)


def test_waves_without_knobs_are_those_of_cgopipe() -> None:
    form = form_for("micro_batches", num_layers=2, num_micro_batches=3, num_pages=3)
    assert str(STREAMING_BUILDERS["micro_batches"](form)) == GOLDEN["cgopipe"]


@pytest.mark.parametrize("name", GOLDEN)
def test_issue_order_of_two_layers_three_waves_and_three_pages(name: str) -> None:
    form = form_for(name, num_layers=2, num_micro_batches=3, num_pages=3)
    assert str(STREAMING_BUILDERS[name](form)) == GOLDEN[name]
