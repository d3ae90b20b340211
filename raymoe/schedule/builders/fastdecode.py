"""FastDecode's schedule with streamed weights added: S2 of MoE-Lightning's figure 6.

Two waves overlap, one on the CPU and one on the GPU, and nothing synchronises them beyond their
data. The weights of a layer come as one block on the lane of the hidden states, so that the next
hidden states wait for all of it.
"""

from dataclasses import replace

from raymoe.schedule.builders.shape import PassForm
from raymoe.schedule.builders.waves import build_waves
from raymoe.schedule.graph import Schedule


def build_fastdecode(form: PassForm) -> Schedule:
    """Attention one wave ahead, weights as one block behind the first wave's hidden states."""
    apart = replace(form, waves_per_group=1, look_ahead=1)
    return build_waves(apart, interleaves_pages=False, name="fastdecode")
