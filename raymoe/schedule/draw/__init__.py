"""Drawings of timelines, predicted or measured: text, SVG and Chrome trace."""

from raymoe.schedule.draw.chrome_trace import draw_chrome_trace
from raymoe.schedule.draw.svg import draw_svg
from raymoe.schedule.draw.text import draw_text

__all__ = ["draw_chrome_trace", "draw_svg", "draw_text"]
