"""The search for the policy of a node without a GPU: all weights are where the work is."""

from collections.abc import Sequence
from dataclasses import dataclass

from raymoe.plan.cost import HostCost, PassShape
from raymoe.plan.device_memory import RUNTIME_BYTES, kv_block_bytes, logit_bytes
from raymoe.plan.footprint import Footprint
from raymoe.plan.load import PassLoad
from raymoe.plan.policy import Policy
from raymoe.plan.streaming import KV_BLOCK_TOKENS
from raymoe.plan.work import ModelWork
from raymoe.schedule.builders.in_place import build_in_place
from raymoe.schedule.graph import Schedule
from raymoe.schedule.simulate import simulate
from raymoe.schedule.timeline import Timeline
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.model import ModelSpec, MoeSpec
from raymoe.specs.workload import Workload
from raymoe.units import ceil_div

PASS_TOKENS = (512, 1024, 2048, 4096, 8192)
BATCH_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
# The smallest size that comes this close to the best is chosen: more tokens in a pass cost a few
# megabytes, more sequences cost gigabytes of KV cache.
GOOD_PASS, GOOD_BATCH = 0.995, 0.98


class HostPass:
    """Passes of a model on the cores of a node.

    Attributes:
        work: The model in numbers.
    """

    def __init__(self, work: ModelWork, hardware: HardwareSpec) -> None:
        self.work, self._hardware = work, hardware
        self._schedule = build_in_place(len(work.layers))

    def schedule(self, load: PassLoad) -> Schedule:
        """The schedule of a pass, whatever it holds."""
        del load
        return self._schedule

    def timeline(self, load: PassLoad) -> Timeline:
        """The predicted timeline of a pass."""
        shape = PassShape.of(load)
        return simulate(self._schedule, HostCost(self.work, self._hardware, shape))

    def seconds(self, load: PassLoad) -> float:
        """Its length."""
        return self.timeline(load).makespan_s if load.tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSearch:
    """Chooses sizes for one model, node and job.

    Attributes:
        model: The model.
        work: The same in numbers.
        hardware: The node.
        workload: The job.
        weight_bytes: All weights in the form the kernels read, mapped or packed.
        max_context_tokens: Longest sequence.
    """

    model: ModelSpec
    work: ModelWork
    hardware: HardwareSpec
    workload: Workload
    weight_bytes: int
    max_context_tokens: int

    def footprint(self, policy: Policy) -> Footprint:
        """Host memory of a policy."""
        return self._footprint(policy.pass_tokens, policy.num_kv_blocks)

    def best(self) -> Policy:
        """The smallest sizes that are about as fast as any.

        Raises:
            InfeasiblePlanError: Not even one sequence fits; shows what needs what.
        """
        passes, workload = HostPass(self.work, self.hardware), self.workload

        def rate(load: PassLoad) -> float:
            return load.tokens / passes.seconds(load)

        pass_rates = [rate(self._prefill(tokens)) for tokens in PASS_TOKENS]
        pass_tokens = _smallest_good(PASS_TOKENS, pass_rates, GOOD_PASS)
        floor = self._footprint(pass_tokens, ceil_div(self.max_context_tokens, KV_BLOCK_TOKENS))
        self.check(floor, f"{self.model.name} with one sequence")
        free = self.hardware.host_memory_bytes - floor.total + floor.bytes_of("KV cache")
        blocks = free // kv_block_bytes(self.work)
        most = max(1, blocks // ceil_div(workload.context_tokens, KV_BLOCK_TOKENS))
        sizes = [size for size in BATCH_SIZES if size <= min(most, pass_tokens)] or [most]
        batch_rates = [rate(self._decode(size)) for size in sizes]
        batch = _smallest_good(sizes, batch_rates, GOOD_BATCH)
        roomy = min(self.max_context_tokens, 2 * workload.context_tokens)
        return Policy(
            batch_size=batch,
            pass_tokens=pass_tokens,
            prefill_chunk_tokens=pass_tokens,
            num_kv_blocks=min(blocks, batch * ceil_div(roomy, KV_BLOCK_TOKENS)),
        )

    def check(self, footprint: Footprint, what: str) -> None:
        """Refuse what does not fit.

        Raises:
            InfeasiblePlanError: With the table and the bytes missing.
        """
        footprint.check_fits(
            self.hardware.host_memory_bytes,
            what=what,
            advice="Reduce batch_size, num_kv_blocks or max_context_tokens, raise "
            "host_memory_bytes, or choose a node with more memory.",
        )

    def _footprint(self, pass_tokens: int, num_kv_blocks: int) -> Footprint:
        return Footprint(
            memory="host memory",
            parts=(
                ("weights", self.weight_bytes),
                ("KV cache", num_kv_blocks * kv_block_bytes(self.work)),
                ("activations", pass_tokens * self._token_bytes() + logit_bytes(self.model)),
                ("runtime", RUNTIME_BYTES),
            ),
        )

    def _token_bytes(self) -> int:
        """Hidden states, projections, and routed rows of the widest layer, of one token."""
        hidden, widest = self.model.hidden_size, 0
        for layer in self.model.layers:
            attention, ffn = layer.attention, layer.ffn
            width = attention.working_width
            if isinstance(ffn, MoeSpec):
                width += ffn.top_k * (ffn.expert_hidden + hidden)
            else:
                width += 2 * ffn.hidden
            widest = max(widest, width)
        return self.work.bytes_per_element * (widest + 5 * hidden)

    def _prefill(self, pass_tokens: int) -> PassLoad:
        chunk = min(self.workload.prompt_tokens, pass_tokens)
        return PassLoad(prompt_tokens=pass_tokens, prompt_chunk=chunk)

    def _decode(self, batch_size: int) -> PassLoad:
        context = self.workload.prompt_tokens + self.workload.generated_tokens / 2
        return PassLoad(decode_rows=batch_size, decode_context=context)


def _smallest_good(sizes: Sequence[int], rates: Sequence[float], share: float) -> int:
    least = share * max(rates)
    return next(size for size, rate in zip(sizes, rates, strict=True) if rate >= least)
