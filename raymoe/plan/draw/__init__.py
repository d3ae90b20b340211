"""Pictures of what a node can do: its rooflines, and throughput against host memory."""

from raymoe.plan.draw.roofline import draw_host_roofline, draw_roofline
from raymoe.plan.draw.throughput import Curve, CurvePoint, draw_throughput

__all__ = ["Curve", "CurvePoint", "draw_host_roofline", "draw_roofline", "draw_throughput"]
