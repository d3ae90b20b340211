"""DeviceJob: what is planned for on a node with a GPU, and the sequences that a KV cache is for."""

from dataclasses import dataclass
from math import ceil

from raymoe.plan.streaming import KV_BLOCK_TOKENS
from raymoe.plan.work import ModelWork
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJob:
    """A model, a node and a job.

    Attributes:
        model: The model.
        work: The same in numbers.
        hardware: The node.
        workload: The job.
        max_context_tokens: Longest sequence.
    """

    model: ModelSpec
    work: ModelWork
    hardware: HardwareSpec
    workload: Workload
    max_context_tokens: int

    def batch_size(self, num_blocks: int, share: float) -> int:
        """A share of the sequences whose KV fits on average: those that join later are shorter.

        0 where the longest sequence does not fit.
        """
        if num_blocks < self.least_blocks:
            return 0
        workload = self.workload
        mean = workload.prompt_tokens + workload.generated_tokens // 2
        return ceil(share * min(workload.num_rows, num_blocks // blocks_of(mean)))

    @property
    def balanced_tokens(self) -> int:
        """Tokens of a pass for which the GPU takes as long as the link for all weights.

        Source: MoE-Lens, section 6.3 (n_real).
        """
        pass_s = self.work.all_weight_bytes / self.hardware.htod_bytes_per_s
        return max(1, int(pass_s * self.hardware.gpu_flop_per_s / self.work.token_flop))

    def useful_blocks(self, num_blocks: int, batch_size: int) -> int:
        """Those of the blocks that so many sequences could fill; more would mostly stay empty."""
        roomy = min(self.max_context_tokens, 2 * self.workload.context_tokens)
        return min(num_blocks, max(self.least_blocks, batch_size * blocks_of(roomy)))

    @property
    def least_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return blocks_of(self.max_context_tokens)


def blocks_of(tokens: int) -> int:
    """KV blocks that tokens of one sequence take."""
    return ceil_div(tokens, KV_BLOCK_TOKENS)
