"""How each operation looks: a letter in text, a colour in pictures.

Colours are those of Okabe and Ito, of Paul Tol's muted and vibrant sets, and greys. A test holds
that any two of one lane differ for people with each kind of colour blindness.
"""

from collections.abc import Mapping
from typing import NamedTuple

from raymoe.schedule.task import Op


class Look(NamedTuple):
    """One operation in drawings; `ink` is the colour of text on `colour`."""

    letter: str
    colour: str
    ink: str
    meaning: str


LOOKS: Mapping[Op, Look] = {
    Op.EMBED: Look("e", "#bbbbbb", "#000000", "tokens"),
    Op.UP: Look("u", "#999999", "#000000", "embeddings"),
    Op.PRE: Look("A", "#56b4e9", "#000000", "norm, QKV"),
    Op.QKV: Look("q", "#44aa99", "#000000", "QKV to host"),
    Op.ATTN: Look("B", "#d55e00", "#ffffff", "CPU attention"),
    Op.KV: Look("k", "#aa4499", "#ffffff", "KV to device"),
    Op.APPEND: Look("a", "#882255", "#ffffff", "new KV"),
    Op.GATTN: Look("G", "#cc79a7", "#000000", "GPU attention"),
    Op.HID: Look("h", "#f0e442", "#000000", "hidden states"),
    Op.POST: Look("C", "#009e73", "#ffffff", "O, router"),
    Op.EXPERTS: Look("X", "#0072b2", "#ffffff", "FFN"),
    Op.STAGE: Look("s", "#999933", "#000000", "page to ring"),
    Op.W: Look("w", "#e69f00", "#000000", "weight page"),
    Op.SYNC: Look("|", "#cc3311", "#ffffff", "wait for all"),
    Op.HEAD: Look("H", "#ddcc77", "#000000", "logits"),
}


def ops_in_order(ops: set[Op]) -> tuple[Op, ...]:
    """Operations in the order of the enumeration, which is that of a layer."""
    return tuple(op for op in Op if op in ops)
