"""The papers' policies in raymoe's terms, to be judged by our cost model.

Assumptions:
- A paper's batch, micro-batches, resident weights and tokens of a step are used as far as they fit.
  Our memory count is higher than the papers': where a policy does not fit, it gets fewer KV blocks,
  fewer resident weights, and steps of half, a quarter, ... of the tokens, with as many rows as
  these hold.
- Batches are no larger than the number of rows.
"""

from dataclasses import dataclass, replace
from math import ceil

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.footprint import device_footprint, host_footprint, kv_block_bytes
from raymoe.plan.papers.hrm import BYTES_PER_ELEMENT, PaperModel
from raymoe.plan.papers.moe_gen import GenSearch
from raymoe.plan.papers.moe_lens import LensNode, stage2
from raymoe.plan.papers.moe_lightning import LightningOptimizer
from raymoe.plan.placement import LayerBytes, Placement
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.work import ModelWork
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.attention.latent import LatentAttentionSpec
from raymoe.specs.hardware import HardwareSpec
from raymoe.specs.layer_weights import EXPERTS, layer_prefix
from raymoe.specs.layers import MoeSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from raymoe.units import GB, ceil_div, format_bytes

# KV that the CPU kernel of MoE-Gen reads on an EPYC 7453: the middle of the rates, 16 to 19 GB/s,
# at which its search has the split of figure 7 (0.6).
GEN_KERNEL_BYTES_PER_S = 17.5 * GB
MAX_GEN_MICRO_BATCHES = 32  # its launches of one row would be thousands of tasks per layer


@dataclass(frozen=True, slots=True)
class PaperPolicies:
    """Each paper's policy for one model, node and job; methods are named after schedules.

    Raises ConfigError if the paper has no formula for the model or job, and InfeasiblePlanError if
    it finds no policy or memory does not hold its batch.
    """

    model: ModelSpec
    hardware: HardwareSpec
    workload: Workload

    def cgopipe(self) -> Policy:
        """MoE-Lightning (ASPLOS 2025), 4.2: all prompts in one step; only experts stream."""
        return self._fitted("cgopipe", self._lightning())

    def vslpipe(self) -> Policy:
        """MoE-Lens, 5.5 and 6.3: KV fills host memory; a step takes GPU and link equally long."""
        workload = self.workload
        node = LensNode.of(self.model, self.hardware)
        max_num_batched_tokens = max(1, int(node.max_num_batched_tokens))
        active = int(stage2(node, workload).active_rows)
        policy = Policy(
            max_num_seqs=max(1, min(active, workload.num_rows, max_num_batched_tokens)),
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk_tokens=min(workload.prompt_tokens, max_num_batched_tokens),
            num_kv_blocks=max(1, int(node.kv_tokens) // KV_BLOCK_TOKENS),
            device=DevicePolicy(num_micro_batches=2),
        )
        return self._fitted("vslpipe", policy)

    def module_batching(self) -> Policy:
        """MoE-Gen (2025), sections 4.3 and 4.4: all rows that the host holds, prompts apart.

        Its CPU kernel does not support MLA. FP8 weights keep their 8 bits on the host and the link.
        """
        model, workload = self.model, self.workload
        has_kernel = not isinstance(model.layers[0].attention, LatentAttentionSpec)
        search = GenSearch(
            model=PaperModel.of(model, self._bytes_per_weight),
            hardware=self.hardware,
            workload=workload,
            cpu_attention_bytes_per_s=GEN_KERNEL_BYTES_PER_S if has_kernel else 0.0,
        )
        decode, prefill = search.decode().policy, search.prefill().policy
        batch = decode.batch_size
        on_device = (1 - decode.cpu_attention_fraction) * batch
        num_micro_batches = min(
            MAX_GEN_MICRO_BATCHES, max(1, ceil(on_device / decode.attention_batch))
        )
        rows = ceil_div(batch, num_micro_batches)
        layers = sum(
            LayerBytes.of(model, i, BYTES_PER_ELEMENT).total for i in range(model.num_layers)
        )
        policy = Policy(
            max_num_seqs=batch,
            max_num_batched_tokens=max(batch, prefill.batch_size * workload.prompt_tokens),
            max_prefill_chunk_tokens=workload.prompt_tokens,
            num_kv_blocks=batch * self._row_blocks,
            device=DevicePolicy(
                num_micro_batches=num_micro_batches,
                cpu_attention_fraction=decode.cpu_attention_fraction,
                resident_bytes=int(decode.resident_fraction * layers),
                staged_blocks=rows * self._row_blocks,
            ),
        )
        return self._fitted("module_batching", policy)

    def flexgen_s3(self) -> Policy:
        """FlexGen with CPU attention at the sizes of `cgopipe`; only the schedule differs.

        Source: MoE-Lightning, table 5, which runs FlexGen with MoE-Lightning's policy; FlexGen's
        own comes from rates fitted to dozens of runs on the node.
        """
        return self._fitted("flexgen_s3", self._lightning())

    def flexgen_s4(self) -> Policy:
        """FlexGen with GPU attention at the sizes of `cgopipe`, plus a micro-batch's KV."""
        wanted = self._lightning()
        assert wanted.device is not None
        rows = ceil_div(wanted.max_num_seqs, wanted.device.num_micro_batches)
        device = replace(wanted.device, staged_blocks=rows * self._row_blocks)
        return self._fitted("flexgen_s4", replace(wanted, device=device))

    def layer_by_layer(self) -> Policy:
        """ZeRO-Inference: one batch, as large as the device holds with all its KV.

        Here the KV is on the host and crosses the link, as in every schedule. Source:
        MoE-Lightning, table 4 (DeepSpeed: one micro-batch, no larger than fits the GPU).
        """
        workload = self.workload
        row = Policy(
            max_num_seqs=1,
            max_num_batched_tokens=workload.prompt_tokens,
            max_prefill_chunk_tokens=workload.prompt_tokens,
            num_kv_blocks=self._row_blocks,
            device=DevicePolicy(num_micro_batches=1, staged_blocks=self._row_blocks),
        )
        bare = self._placed("layer_by_layer", row, resident_bytes=0)
        spare = self.hardware.gpu_memory_bytes - self._device_bytes(bare)
        row_bytes = self._row_blocks * kv_block_bytes(self._work)
        batch = max(1, min(workload.num_rows, spare // row_bytes))
        wanted = replace(
            row,
            max_num_seqs=batch,
            max_num_batched_tokens=batch * workload.prompt_tokens,
            num_kv_blocks=batch * self._row_blocks,
            device=DevicePolicy(num_micro_batches=1, staged_blocks=batch * self._row_blocks),
        )
        return self._fitted("layer_by_layer", wanted)

    def _lightning(self) -> Policy:
        model, workload = self.model, self.workload
        best = LightningOptimizer(
            model=PaperModel.of(model),
            hardware=self.hardware,
            prompt_tokens=workload.prompt_tokens,
            generated_tokens=workload.generated_tokens,
        ).best()
        layers = [LayerBytes.of(model, i, BYTES_PER_ELEMENT) for i in range(model.num_layers)]
        common = sum(layer.common for layer in layers)
        experts = sum(layer.total for layer in layers) - common
        batch = min(best.batch_size, workload.num_rows)
        return Policy(
            max_num_seqs=batch,
            max_num_batched_tokens=batch * workload.prompt_tokens,
            max_prefill_chunk_tokens=workload.prompt_tokens,
            num_kv_blocks=batch * self._row_blocks,
            device=DevicePolicy(
                num_micro_batches=ceil_div(batch, best.micro_batch_size),
                resident_bytes=common + int(best.resident_fraction * experts),
            ),
        )

    def _fitted(self, schedule: str, wanted: Policy) -> Policy:
        tokens = wanted.max_num_batched_tokens
        while tokens:
            batch = min(wanted.max_num_seqs, tokens)
            policy = self._sized(
                schedule, replace(wanted, max_num_batched_tokens=tokens, max_num_seqs=batch)
            )
            if policy is not None:
                return policy
            tokens //= 2
        raise InfeasiblePlanError(
            f"{schedule} with the policy of its paper does not fit {self.hardware.name}: "
            f"{format_bytes(self.hardware.gpu_memory_bytes)} of device memory and "
            f"{format_bytes(self.hardware.host_memory_bytes)} of host memory"
        )

    def _sized(self, schedule: str, wanted: Policy) -> Policy | None:
        hardware = self.hardware
        bare = self._placed(schedule, wanted, resident_bytes=0)
        spare = hardware.gpu_memory_bytes - self._device_bytes(bare)
        if spare < 0:
            return None
        resident = min(spare, 0 if wanted.device is None else wanted.device.resident_bytes)
        placed = self._placed(schedule, replace(wanted, num_kv_blocks=1), resident_bytes=resident)
        free = hardware.host_memory_bytes - host_footprint(self.model, self._work, placed).total
        num_blocks = min(wanted.num_kv_blocks, 1 + free // kv_block_bytes(self._work))
        if num_blocks < self._row_blocks:
            return None
        return replace(placed.policy, num_kv_blocks=num_blocks)

    def _placed(self, schedule: str, policy: Policy, *, resident_bytes: int) -> Placement:
        device = replace(policy.device or DevicePolicy(), resident_bytes=resident_bytes)
        policy = replace(policy, device=device)
        return Placement.of(self.model, schedule, policy, BYTES_PER_ELEMENT)

    def _device_bytes(self, placement: Placement) -> int:
        return device_footprint(self.model, self._work, placement).total

    @property
    def _bytes_per_weight(self) -> int:
        """Those of experts, which are nearly all that is streamed."""
        sparse = (i for i, layer in enumerate(self.model.layers) if isinstance(layer.ffn, MoeSpec))
        names = (f"{layer_prefix(i)}{EXPERTS}0.down_proj.weight" for i in sparse)
        shape = (self.model.hidden_size, 1)
        stored = (self.model.stored_format_of(name, shape) for name in names)
        is_fp8 = any(each is not None and each.name.startswith("fp8") for each in stored)
        return 1 if is_fp8 else BYTES_PER_ELEMENT

    @property
    def _row_blocks(self) -> int:
        return ceil_div(self.workload.context_tokens, KV_BLOCK_TOKENS)

    @property
    def _work(self) -> ModelWork:
        return ModelWork.of(self.model, BYTES_PER_ELEMENT)
