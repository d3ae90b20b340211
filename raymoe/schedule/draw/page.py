"""What all pictures share: the page, its letters, its colours on light and dark, round ticks."""

import math
from collections.abc import Iterable
from html import escape

STYLE = """\
text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #1b1f24 }
.page { fill: #ffffff } .lane { fill: #eef0f2 } .tick { stroke: #c8ccd1; stroke-width: 1 }
.title { font-size: 16px; font-weight: 600 } .name { font-weight: 600 }
.end { text-anchor: end } .middle { text-anchor: middle } .label { font-size: 10px }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e8ea }
  .page { fill: #16191d } .lane { fill: #262b31 } .tick { stroke: #454c55 }
}"""


def svg_page(title: str, width: int, height: float, body: Iterable[str], *, style: str = "") -> str:
    """The SVG text of a picture with its heading.

    Args:
        title: The heading.
        width: Pixels.
        height: Pixels.
        body: Elements, in order of drawing.
        style: Rules beyond those of all pictures.
    """
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
            f'width="{width}" height="{height:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}{style}</style>",
            f'<rect class="page" width="{width}" height="{height:.0f}"/>',
            text_at(16, 26, title, "title"),
            *body,
            "</svg>\n",
        ]
    )


def text_at(x: float, y: float, text: str, style: str, *, colour: str = "") -> str:
    """A line of text; `style` names classes of the page, whose ink `colour` replaces."""
    ink = f' style="fill:{colour}"' if colour else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:g}"{ink}>{escape(text)}</text>'


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
