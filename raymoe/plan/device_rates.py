"""DeviceRates: what the host, the GPU and the link of a node reach during one pass.

Assumptions:
- While weights stream, the link takes its bytes from host memory and tasks on the CPU get the rest
  (MoE-Lens, section 5.3, equation 5), at least half.
- While the CPU reads KV, the link is slower (MoE-Lens, section 13).
- A measured node attends on the CPU at its measured rate, and at that share of it which the link
  leaves of the bandwidth; its GPU multiplies 16-bit weights at its measured rate. All else is by
  formula, measured or not.
"""

from dataclasses import dataclass
from functools import cached_property

from raymoe.plan.wave import AttentionShape
from raymoe.plan.work import Matrices
from raymoe.schedule.task import Resource
from raymoe.specs.curve import Curve
from raymoe.specs.hardware import DeviceCurves, HardwareSpec

# Rows at which a matrix product on the GPU reaches half of its best rate beyond the memory bound:
# 0.94 at the 2^10 tokens per expert at which MoE-Gen, figure 3, finds the GPU saturated.
HALF_EFFICIENCY_ROWS = 64.0
# Of host read bandwidth: our kernel reads the cache at 0.84 to 0.93 of it (README, Results).
CPU_ATTENTION_EFFICIENCY = 0.85
# Of the rate of the link, while the CPU reads KV: MoE-Lens, section 13, sees weights take 6 s
# instead of 5 beside 210 GB of KV, which that host reads in 1.9 s by the formulas here.
BUSY_LINK_SHARE = 0.5
# Reading the pageable original and writing the pinned copy, beside the read by the link.
STAGED_PASSES, DIRECT_PASSES = 3, 1


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one pass.

    Attributes:
        hardware: The node.
        is_16_bit: Whether activations have 16 bits, as those that were measured.
        page_bytes: Weights of the mean layer that come over the link.
        read_bytes: KV that the CPU reads for the mean layer.
        is_staged: Whether pages go through a pinned staging ring.
    """

    hardware: HardwareSpec
    is_16_bit: bool
    page_bytes: float
    read_bytes: float
    is_staged: bool

    @property
    def host_bytes_per_s(self) -> float:
        """Host bandwidth that the link and its staging leave to the CPU.

        Source: MoE-Lens, section 5.3, equation 5: the need is the sum of KV and link traffic.
        """
        whole = self.hardware.host_bytes_per_s
        if not self.page_bytes:
            return whole
        passes = STAGED_PASSES if self.is_staged else DIRECT_PASSES
        return max(whole / 2, whole - passes * self.hardware.htod_bytes_per_s)

    @cached_property
    def htod_bytes_per_s(self) -> float:
        """What the link reaches on average, slower while the CPU reads KV.

        Source: MoE-Lens, section 13.
        """
        free = self.hardware.htod_bytes_per_s
        if not self.page_bytes:
            return free
        busy_share = BUSY_LINK_SHARE
        if self._device_curves is not None:
            busy_share = min(1.0, self._device_curves.busy_htod_bytes_per_s / free)
        reading_s = self.read_bytes / (CPU_ATTENTION_EFFICIENCY * self.host_bytes_per_s)
        slowdown = 1 + (1 - busy_share) * reading_s * free / self.page_bytes
        return free / min(slowdown, 1 / busy_share)

    def roof_s(self, resource: Resource, flop: float, num_bytes: float) -> float:
        """The longer of operations and bytes on the level of a resource.

        Source: MoE-Lightning, section 3.2, equation 8.
        """
        if resource is Resource.GPU:
            hardware = self.hardware
            return max(flop / hardware.gpu_flop_per_s, num_bytes / hardware.gpu_bytes_per_s)
        return max(flop / self.hardware.host_flop_per_s, num_bytes / self.host_bytes_per_s)

    def copy_s(self, resource: Resource, num_bytes: float) -> float:
        """A copy over the link, from or to pinned memory."""
        is_htod = resource is Resource.HTOD
        return num_bytes / (self.htod_bytes_per_s if is_htod else self.hardware.dtoh_bytes_per_s)

    def host_attention_s(self, share: AttentionShape, token_bytes: float, flop: float) -> float:
        """Appending and attention on the CPU: at measured rates where the node has them.

        Args:
            share: Of the CPU.
            token_bytes: KV of one token in one layer.
            flop: Operations of all pairs.
        """
        read = share.context_tokens * token_bytes
        curves = self.hardware.host_curves if self.is_16_bit else None
        if curves is None or not share.rows:
            appended = 2 * share.rows * token_bytes
            return self.roof_s(Resource.CPU, flop, read / CPU_ATTENTION_EFFICIENCY + appended)
        left = self.host_bytes_per_s / self.hardware.host_bytes_per_s
        rate = left * curves.attention_bytes_per_s.at(share.context_tokens / share.rows)
        return max(read / rate, flop / curves.attention_flop_per_s)

    def projection_s(self, rows: float, weights: Matrices) -> float:
        """One matrix product on the GPU whose weights are read once, of so many rows."""
        curves = self._device_curves
        return self._product_s(rows, weights, curves.product_flop_per_s if curves else None)

    def expert_s(self, rows: float, weights: Matrices) -> float:
        """One expert with so many rows on the GPU."""
        curves = self._device_curves
        return self._product_s(rows, weights, curves.expert_flop_per_s if curves else None)

    def _product_s(self, rows: float, weights: Matrices, measured: Curve | None) -> float:
        if not rows:
            return 0.0
        if measured is not None and weights.num_bytes >= 2 * weights.parameters:
            return 2 * rows * weights.parameters / measured.at(rows)
        flop = 2 * (rows + HALF_EFFICIENCY_ROWS) * weights.parameters
        return self.roof_s(Resource.GPU, flop, weights.num_bytes)

    @property
    def _device_curves(self) -> DeviceCurves | None:
        """Measured with numbers of 16 bits; None where they are not."""
        return self.hardware.device_curves if self.is_16_bit else None
