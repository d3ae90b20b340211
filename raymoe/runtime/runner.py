"""PassRunner: one pass of tokens through all layers, by a schedule."""

import torch

from raymoe.memory.kv_cache import KvCache
from raymoe.model.decoder import Decoder
from raymoe.runtime.bindings import PassInputs, PassState, bind_cpu
from raymoe.runtime.executor import SerialExecutor
from raymoe.schedule.graph import Schedule
from raymoe.schedule.timeline import Timeline


class PassRunner:
    """Runs passes of one model on the device `cpu`; holds nothing between passes."""

    def __init__(self, decoder: Decoder, cache: KvCache, schedule: Schedule) -> None:
        self._decoder = decoder
        self._executor = SerialExecutor(schedule, bind_cpu(decoder, cache))

    @torch.inference_mode()
    def run(self, inputs: PassInputs) -> Timeline:
        """Run one pass; `inputs.on_logits` receives the logits. Returns what was measured."""
        self._decoder.reserve(inputs.num_positions)
        return self._executor.run(PassState(inputs))
