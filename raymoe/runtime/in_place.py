"""Where weights, KV cache and work are in one memory: the host's, or that of a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raymoe.device.device import Device
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.elementwise import Routing
from raymoe.kernels.paged_kv import CacheLayout, largest_layout
from raymoe.memory.kv_cache import copy_states
from raymoe.model.decoder import Decoder, Projected, StagedRows
from raymoe.runtime.batch import InputBatch
from raymoe.runtime.executor import Bindings, Executor, Run
from raymoe.runtime.inputs import StepInputs, ngrams_of
from raymoe.runtime.micro_batches import whole_batch
from raymoe.runtime.runner import BeforeStep
from raymoe.schedule.graph import Op, Schedule, Task


@dataclass(slots=True)
class InPlaceState:
    """What lives between the tasks of one step; every field is owned by the step.

    Attributes:
        prompt_tokens_T: int32; None where the decoder does not need it.
        attention: The sequences; on a device as indices there.
        experts_NTK: Experts that token ids decide, of each such layer; None if there are none.
        ngrams_NTE: Embeddings of n-grams, of each layer that reads them; None if none does.
        wanted_RH: The last hidden states of the rows whose logits are wanted, normed.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    prompt_tokens_T: Tensor | None
    logit_rows_R: Tensor
    attention: AttentionBatch | StagedRows
    experts_NTK: Tensor | None
    ngrams_NTE: Tensor | None
    hidden_TH: Tensor | None = None
    projected: Projected | None = None
    attention_TX: Tensor | None = None
    normed_TH: Tensor | None = None
    routing: Routing | None = None
    factors_TF: Tensor | None = None
    wanted_RH: Tensor | None = None


class InPlace:
    """A model and its KV cache in one memory; every operation works there, and nothing moves.

    Args:
        cache: KV blocks or states of each layer.
        build: Makes the schedule for a number of layers.
        device: Whose memory it is.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: Sequence[Tensor],
        layouts: Sequence[CacheLayout],
        *,
        build: Callable[[int], Schedule],
        device: Device,
        before_step: BeforeStep | None = None,
    ) -> None:
        self.decoder, self._cache, self._layouts = decoder, cache, layouts
        self._layout = largest_layout(layouts)
        self._device, self._before_step = device, before_step
        self._inputs = StepInputs(device)
        schedule = build(decoder.spec.num_layers)
        self._executor = Executor(schedule, self.bindings, device.lanes)

    @property
    def bindings(self) -> Bindings[InPlaceState]:
        """What each operation does."""
        return {
            Op.EMBED: self.embed,
            Op.PRE: self.pre,
            Op.ATTN: self.attend,
            Op.POST: self.post,
            Op.EXPERTS: self.experts,
            Op.HEAD: self.head,
        }

    def begin(self, batch: InputBatch) -> tuple[Tensor, Run[InPlaceState]]:
        """Run a step until its hidden rows are there.

        Raises:
            ExecutionError: A task failed.
        """
        decoder, target = self.decoder, self._device.torch_device
        decoder.reserve(batch.num_positions)
        if batch.state_copies:
            copy_states(self._cache, self._layouts, batch.state_copies)
        sequences = batch.sequences.to_tensors()
        attention: AttentionBatch | StagedRows = sequences
        if self._device.lanes:
            attention = decoder.staged_batch(sequences, self._layout, target, with_states=sequences)
        prompts = batch.prompt_tokens if decoder.needs_prompt_tokens else None
        token_ids_T = torch.from_numpy(batch.token_ids)
        state = InPlaceState(
            token_ids_T,
            torch.from_numpy(batch.positions),
            None if prompts is None else torch.from_numpy(prompts),
            torch.from_numpy(batch.logit_rows),
            attention,
            decoder.experts_of_tokens(token_ids_T),
            ngrams_of(decoder, batch),
        )
        if self._device.lanes:
            state = self._inputs.send(state)
            self._device.synchronize()
        if self._before_step is not None:
            self._before_step(whole_batch(batch), self._executor.schedule, 0)
        run = self._executor.start(state, until=Op.HEAD)
        assert state.wanted_RH is not None
        return state.wanted_RH, run

    def embed(self, _task: Task, state: InPlaceState) -> None:
        state.hidden_TH = self.decoder.embed(state.token_ids_T)

    def pre(self, task: Task, state: InPlaceState) -> None:
        assert state.hidden_TH is not None
        state.projected = self.decoder.pre(
            task.layer,
            state.hidden_TH,
            state.positions_T,
            state.prompt_tokens_T,
            ngrams_NTE=state.ngrams_NTE,
        )

    def attend(self, task: Task, state: InPlaceState) -> None:
        projected, batch, cache = state.projected, state.attention, self._cache[task.layer]
        assert projected is not None
        if isinstance(batch, AttentionBatch):
            state.attention_TX = self.decoder.attend(task.layer, projected, cache, batch)
        else:
            state.attention_TX = self.decoder.attend_staged(task.layer, projected, cache, batch)
        state.projected = None

    def post(self, task: Task, state: InPlaceState) -> None:
        assert state.hidden_TH is not None
        assert state.attention_TX is not None
        state.hidden_TH, state.normed_TH, state.routing, state.factors_TF = self.decoder.post(
            task.layer, state.hidden_TH, state.attention_TX, experts_NTK=state.experts_NTK
        )
        state.attention_TX = None

    def experts(self, task: Task, state: InPlaceState) -> None:
        assert state.hidden_TH is not None
        assert state.normed_TH is not None
        state.hidden_TH = self.decoder.ffn(
            task.layer,
            state.hidden_TH,
            state.normed_TH,
            state.routing,
            factors_TF=state.factors_TF,
        )

    def head(self, _task: Task, state: InPlaceState) -> None:
        assert state.hidden_TH is not None
        state.wanted_RH = self.decoder.final(state.hidden_TH, state.logit_rows_R)
