"""Where weights and KV stream between host and device: what each operation of a step does."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from raymoe.device.mover import Copies
from raymoe.device.threads import torch_on_all_cores
from raymoe.errors import CapacityError
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_experts import ExpertGroup
from raymoe.kernels.elementwise import Routing
from raymoe.kernels.paged_kv import CacheLayout, CompressedLayout, largest_layout
from raymoe.memory.activations import DeviceActivations, HostActivations, LayerActivations
from raymoe.memory.kv_cache import copy_states
from raymoe.memory.weight_pages import WeightPages
from raymoe.model.decoder import Decoder, Posted, StagedRows
from raymoe.model.feed_forward import HostExperts
from raymoe.runtime.executor import Bindings, OnDead
from raymoe.runtime.inputs import StepInputs, ngrams_of
from raymoe.runtime.micro_batches import CutBatch, MicroBatch
from raymoe.schedule.graph import Buffer, Op, Task
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import StepForm

_RINGED = frozenset(("qkv", "host_qkv", "host_attention", "attention", "device_attention"))
_STAGED = frozenset(("staged_kv",))
_TOKENS = frozenset(("hidden", "expert_sum"))
_ROWS = frozenset(("routed", "host_rows", "host_sum"))
_RETURNED = frozenset(("returned_sum",))


@dataclass(slots=True)
class StreamedState:
    """One step in micro-batch order.

    Attributes:
        prompt_tokens_T: int32; None where the decoder does not need it.
        experts_NTK: Experts that token ids decide, of each such layer; None if there are none.
        ngrams_NTE: Embeddings of n-grams, of each layer that reads them; None if none does.
        logit_places_R: int64, tokens whose logits are wanted, in the order of the original step.
        host: Of each micro-batch, the sequences for which the host attends.
        device: Those for which the device does, with blocks of the host's cache.
        staged: The same as indices on the device.
        used: Device memory of the buffers that were written last.
        wanted_RH: The last hidden states of the rows whose logits are wanted, normed.
    """

    cut: CutBatch
    form: StepForm
    token_ids_T: Tensor
    positions_T: Tensor
    prompt_tokens_T: Tensor | None
    experts_NTK: Tensor | None
    ngrams_NTE: Tensor | None
    logit_places_R: Tensor
    host: Sequence[AttentionBatch]
    device: Sequence[AttentionBatch]
    staged: Sequence[StagedRows]
    used: dict[Buffer, tuple[Tensor, ...]] = field(default_factory=dict)
    wanted_RH: Tensor | None = None

    def micro_batch(self, task: Task) -> MicroBatch:
        return self.cut.micro_batches[task.part]

    def rows(self, micro_batches: Sequence[int]) -> slice:
        """Tokens of neighbouring micro-batches."""
        first, last = (self.cut.micro_batches[micro_batches[place]] for place in (0, -1))
        return slice(first.begin, last.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedMemory:
    """A model whose weights stream through the slots of a device, and what each operation does.

    Attributes:
        top_k: Experts per token of each layer; 0 where it has none.
        expert_groups: The experts of each group, per layer; empty where they are computed at once.
        host_experts: Those of each layer that cores may compute; None where there are none.
        decoders: The model over the slots, by the slot of layer 0.
        kv: KV blocks of each layer on the host, in its layout; states where it has them.
        states: States of all sequences by layer; empty for layers with KV, and where the host has
            them.
        host: Activations on the host; its ring is as long as that of the device.
        inputs: Sends indices and positions of a step to the device.
        staging: Pinned pages between pageable memory and the device; empty if nothing is staged.
        is_cache_pinned: Whether the KV cache is page-locked.
        poison: Overwrites device memory that nobody will read: whoever reads it after all shows.
    """

    top_k: tuple[int, ...]
    expert_groups: tuple[tuple[range, ...], ...]
    host_experts: tuple[HostExperts | None, ...]
    torch_device: torch.device
    decoders: tuple[Decoder, Decoder]
    weights: WeightPages
    kv: Sequence[Tensor]
    layouts: Sequence[CacheLayout]
    states: Sequence[Tensor]
    device: DeviceActivations
    host: HostActivations
    inputs: StepInputs
    staging: Sequence[Tensor]
    is_cache_pinned: bool
    poison: Callable[[Tensor], None] | None = None

    @property
    def bindings(self) -> Bindings[StreamedState]:
        return {
            Op.EMBED: self.embed,
            Op.UP: self.up,
            Op.PRE: self.pre,
            Op.QKV: self.qkv,
            Op.ATTN: self.attend_on_host,
            Op.APPEND: self.append,
            Op.KV: self.stage_kv,
            Op.GATTN: self.attend_on_device,
            Op.HID: self.hid,
            Op.POST: self.post,
            Op.ROWS: self.send_rows,
            Op.CEXPERTS: self.experts_on_host,
            Op.SUMS: self.return_sums,
            Op.EXPERTS: self.experts,
            Op.HEAD: self.head,
            Op.W: self.load_page,
            Op.STAGE: self.stage_page,
            Op.SYNC: self.sync,
        }

    @property
    def on_dead(self) -> OnDead[StreamedState] | None:
        """What to do with buffers that nobody will read."""
        return None if self.poison is None else self._poison_dead

    @torch.inference_mode()
    def _poison_dead(self, buffer: Buffer, state: StreamedState) -> None:
        assert self.poison is not None
        for tensor in state.used.pop(buffer, ()):
            self.poison(tensor)

    def prepare(self, cut: CutBatch, form: StepForm) -> StreamedState:
        """Make the state of a step.

        Raises:
            CapacityError: A micro-batch is larger than its buffers.
        """
        self._check_room(cut)
        batch, decoder = cut.batch, self.decoders[0]
        for each in self.decoders:
            each.reserve(batch.num_positions)
        if batch.state_copies:
            copy_states(self.kv, self.layouts, batch.state_copies)
            copy_states(self.states, self.layouts, batch.state_copies)
        layout = largest_layout(self.layouts)
        are_staged = any(isinstance(each, CompressedLayout) for each in self.layouts)
        has_states = any(len(states) for states in self.states)
        prompts = batch.prompt_tokens if decoder.needs_prompt_tokens else None
        staged = [
            decoder.staged_batch(
                each.staged.to_tensors(),
                layout,
                self.torch_device,
                with_states=each.sequences.to_tensors()
                if has_states
                else each.staged.to_tensors()
                if are_staged
                else None,
            )
            for each in cut.micro_batches
        ]
        token_ids_T = torch.from_numpy(batch.token_ids)
        positions_T, prompt_tokens_T, experts_NTK, ngrams_NTE, logit_places_R, staged = (
            self.inputs.send(
                (
                    torch.from_numpy(batch.positions),
                    None if prompts is None else torch.from_numpy(prompts),
                    decoder.experts_of_tokens(token_ids_T),
                    ngrams_of(decoder, batch),
                    torch.from_numpy(batch.logit_rows),
                    staged,
                )
            )
        )
        return StreamedState(
            cut=cut,
            form=form,
            token_ids_T=token_ids_T,  # the host embeds
            positions_T=positions_T,
            prompt_tokens_T=prompt_tokens_T,
            experts_NTK=experts_NTK,
            ngrams_NTE=ngrams_NTE,
            logit_places_R=logit_places_R,
            host=[each.host.to_tensors() for each in cut.micro_batches],
            device=[each.device.to_tensors() for each in cut.micro_batches],
            staged=staged,
        )

    def _check_room(self, cut: CutBatch) -> None:
        room = self.device.ring[0].num_tokens
        if cut.max_tokens > room:
            raise CapacityError(
                f"a micro-batch has {cut.max_tokens} tokens, the device has room for {room}; "
                "reduce max_prefill_chunk_tokens or max_num_batched_tokens, or use more "
                "micro-batches"
            )

    def embed(self, task: Task, state: StreamedState) -> None:
        rows = state.micro_batch(task).rows
        embedded_TH = self._decoder(state).embed(state.token_ids_T[rows])
        self.host.embedded_TH[rows].copy_(embedded_TH)

    def up(self, task: Task, state: StreamedState) -> Copies:
        rows = state.micro_batch(task).rows
        return Copies.of((self.device.hidden_TH[rows], self.host.embedded_TH[rows]))

    def pre(self, task: Task, state: StreamedState) -> None:
        micro_batch, prompt_tokens_T = state.micro_batch(task), state.prompt_tokens_T
        if prompt_tokens_T is not None:
            prompt_tokens_T = prompt_tokens_T[micro_batch.rows]
        ngrams_NTE = state.ngrams_NTE
        count, split = micro_batch.num_tokens, micro_batch.num_host_tokens
        into = self._on_device(task)
        is_split = split > 0 and not into.has_one_form
        out = into.projected(0, count)
        if is_split:  # the host's queries change their form, which is larger
            out = out._replace(query_THD=torch.empty_like(out.query_THD))
        query_THD, *_ = self._decoder(state).pre(
            task.layer,
            self.device.hidden_TH[micro_batch.rows],
            state.positions_T[micro_batch.rows],
            prompt_tokens_T,
            ngrams_NTE=None if ngrams_NTE is None else ngrams_NTE[:, micro_batch.rows],
            out=out,
        )
        if is_split:
            host = into.absorbed(split)
            self._decoder(state).absorb(task.layer, query_THD[:split], host.query_THD)
            out = into.projected(split, count)
            if split < count:
                out.query_THD.copy_(query_THD[split:])
            self._wrote(task, state, *host, *out)
        else:
            self._wrote(task, state, *out)

    def qkv(self, task: Task, state: StreamedState) -> Copies:
        micro_batch = state.micro_batch(task)
        target, source = self._on_host(task), self._on_device(task)
        end, num_tokens = micro_batch.num_host_tokens, micro_batch.num_tokens
        return Copies.of(
            (target.absorbed(end).query_THD, source.absorbed(end).query_THD),
            *zip(target.cached(0, num_tokens), source.cached(0, num_tokens), strict=True),
        )

    def attend_on_host(self, task: Task, state: StreamedState) -> None:
        end, activations = state.micro_batch(task).num_host_tokens, self._on_host(task)
        result_TX = self._decoder(state).attend_absorbed(
            task.layer, activations.absorbed(end), self._cache(task), state.host[task.part]
        )
        activations.absorbed_result(end).copy_(result_TX)

    def append(self, task: Task, state: StreamedState) -> None:
        micro_batch = state.micro_batch(task)
        projected = self._on_host(task).projected(
            micro_batch.num_host_tokens, micro_batch.num_tokens
        )
        self._decoder(state).append(
            task.layer, projected, self._cache(task), state.device[task.part]
        )

    def stage_kv(self, task: Task, state: StreamedState) -> Copies:
        micro_batch = state.micro_batch(task)
        staged, cache = self._staged(task), self._cache(task)
        staging = micro_batch.staging
        if self._decoder(state).is_windowed(task.layer):
            staging = micro_batch.window_staging
        layout, is_pinned = self.layouts[task.layer], self.is_cache_pinned
        if not isinstance(layout, CompressedLayout):
            copies = Copies.of_runs(staged, cache, staging.runs_N3, is_pinned=is_pinned)
            return self._writing(task, state, copies, staged[: staging.num_blocks])
        blocks, cached = layout.blocks(staged), layout.blocks(cache)
        slots, of_host = layout.slots(staged), layout.slots(cache)
        # The first slot is the last one in memory.
        runs_N3 = [len(of_host) - 1, len(slots) - 1, 2] - staging.states_N3
        copies = Copies.of_all(
            Copies.of_runs(blocks, cached, staging.runs_N3, is_pinned=is_pinned)
            if layout.block_bytes
            else Copies(),
            Copies.of_runs(slots, of_host, runs_N3, is_pinned=is_pinned),
        )
        return self._writing(task, state, copies, staged)

    def attend_on_device(self, task: Task, state: StreamedState) -> None:
        micro_batch, activations = state.micro_batch(task), self._on_device(task)
        states = self.states[task.layer]
        begin = 0 if len(states) else micro_batch.num_host_tokens
        into = activations.result(begin, micro_batch.num_tokens)
        self._decoder(state).attend_staged(
            task.layer,
            activations.projected(begin, micro_batch.num_tokens),
            states if len(states) else self._staged(task),
            state.staged[task.part],
            out=into,
        )
        self._wrote(task, state, into)

    def hid(self, task: Task, state: StreamedState) -> Copies:
        end = state.micro_batch(task).num_host_tokens
        into = self._on_device(task).absorbed_result(end)
        copies = Copies.of((into, self._on_host(task).absorbed_result(end)))
        return self._writing(task, state, copies, into)

    def post(self, task: Task, state: StreamedState) -> None:
        rows, device = state.micro_batch(task).rows, self.device
        top_k = self.top_k[task.layer]
        routing = device.routing(rows, top_k) if top_k else None
        factors_TF = None if device.factors_TF is None else device.factors_TF[rows]
        out = Posted(device.hidden_TH[rows], device.normed_TH[rows], routing, factors_TF)
        experts_NTK = None if state.experts_NTK is None else state.experts_NTK[:, rows]
        attended_TX = self._attended(task, state)
        self._decoder(state).post(
            task.layer, out.hidden_TH, attended_TX, out, experts_NTK=experts_NTK
        )
        used = [out.normed_TH, *(routing or ()), *(() if factors_TF is None else (factors_TF,))]
        latent_TL = self._latent(task.layer, rows)
        if latent_TL is not None:
            used.append(self._decoder(state).to_latent(task.layer, out.normed_TH, latent_TL))
        state.used[Buffer("routed", (task.part,))] = tuple(used)

    def _latent(self, layer: int, rows: slice) -> Tensor | None:
        """Where the experts of a layer read a latent of these tokens; None if they read none."""
        latent_TL = self.device.latent_TL
        return latent_TL[rows] if latent_TL is not None and self.top_k[layer] else None

    def send_rows(self, task: Task, state: StreamedState) -> Copies:
        device, host = self.device, self.host
        experts = self.host_experts[task.layer]
        assert experts is not None
        rows = state.rows(_keys_of(task.reads, _ROWS))
        source_TL = self._latent(task.layer, rows)
        if source_TL is None:
            source_TL = (device.hidden_TH if experts.reads_hidden else device.normed_TH)[rows]
        return Copies.of(
            (host.rows_TL[rows], source_TL),
            (host.topk_ids_TK[rows], device.topk_ids_TK[rows]),
            (host.topk_weights_TK[rows], device.topk_weights_TK[rows]),
        )

    def experts_on_host(self, task: Task, state: StreamedState) -> None:
        host, layer = self.host, task.layer
        experts = self.host_experts[layer]
        assert experts is not None
        rows = state.rows(_keys_of(task.reads, _ROWS))
        group = ExpertGroup(state.form.layers[layer].host_experts, host.sum_TL[rows].zero_())
        routing = host.routing(rows, self.top_k[layer])
        # The lanes' threads may have another number of torch threads.
        with torch_on_all_cores() if experts.uses_torch else nullcontext():
            experts.add(host.rows_TL[rows], routing, group)

    def return_sums(self, task: Task, state: StreamedState) -> Copies:
        rows = state.rows(_keys_of(task.reads, _ROWS))
        source_TL = self.host.sum_TL[rows]
        into = self.device.returned_sum(_key_of(task, _RETURNED), len(source_TL))
        return self._writing(task, state, Copies.of((into, source_TL)), into)

    def experts(self, task: Task, state: StreamedState) -> None:
        device, layer, decoder = self.device, task.layer, self._decoder(state)
        micro_batches = _keys_of(task.writes, _TOKENS)
        rows = state.rows(micro_batches)
        hidden_TH, normed_TH = device.hidden_TH[rows], device.normed_TH[rows]
        latent_TL = self._latent(layer, rows)
        chosen: Routing | Tensor | None = None
        if top_k := self.top_k[layer]:
            chosen = device.routing(rows, top_k)
        pages = state.form.layers[layer]
        if pages.num_groups > 1 or pages.host_experts:
            assert isinstance(chosen, Routing)
            group, sum_TL = task.part % pages.num_groups, device.expert_sum_TL[rows]
            if group < pages.num_device_groups:
                if not group:
                    sum_TL.zero_()
                into = ExpertGroup(self._experts_of(layer, group, pages), sum_TL)
                rows_TL = normed_TH if latent_TL is None else latent_TL
                decoder.add_experts(layer, (hidden_TH, rows_TL), chosen, into)
            if group + 1 < pages.num_groups:
                for buffer, micro_batch in zip(task.writes, micro_batches, strict=True):
                    part = device.expert_sum_TL[state.cut.micro_batches[micro_batch].rows]
                    state.used[buffer] = (part,)
                return
            if pages.host_experts:
                returned_TL = device.returned_sum(_key_of(task, _RETURNED), len(sum_TL))
                sum_TL = sum_TL.add_(returned_TL) if group else returned_TL
            chosen = sum_TL.to(hidden_TH.dtype)
        factors_TF = None if device.factors_TF is None else device.factors_TF[rows]
        decoder.ffn(layer, hidden_TH, normed_TH, chosen, latent_TL=latent_TL, factors_TF=factors_TF)

    def _experts_of(self, layer: int, group: int, pages: LayerPlacement) -> range:
        """Experts of a group that the device computes."""
        groups, on_host = self.expert_groups[layer], pages.host_experts
        if not pages.group_pages:
            return range(on_host.start)
        end = on_host.start if on_host else groups[group].stop
        return range(groups[group].start, min(groups[group].stop, end))

    def head(self, _task: Task, state: StreamedState) -> None:
        hidden_TH = self.device.hidden_TH
        state.wanted_RH = self.decoders[0].final(hidden_TH, state.logit_places_R)

    def load_page(self, task: Task, state: StreamedState) -> Copies:
        weights = self.weights
        slot, _ = task.writes[0].key
        source = weights.host_page(task.layer, task.part)
        staged = next((buffer for buffer in task.reads if buffer.name == "staging"), None)
        if staged is not None:
            source = self.staging[staged.key[0]][: len(source)]
        into = weights.slot_page(task.layer, task.part, slot)
        return self._writing(task, state, Copies.of((into, source)), into)

    def stage_page(self, task: Task, _state: StreamedState) -> None:
        source = self.weights.host_page(task.layer, task.part)
        (slot,) = task.writes[0].key
        self.staging[slot][: len(source)].copy_(source)

    def sync(self, task: Task, state: StreamedState) -> None:
        """Nothing: the schedule's dependencies are the wait."""

    def _writing(
        self, task: Task, state: StreamedState, copies: Copies, *tensors: Tensor
    ) -> Copies:
        copies.record = partial(self._wrote, task, state, *tensors)
        return copies

    def _wrote(self, task: Task, state: StreamedState, *tensors: Tensor) -> None:
        state.used[task.writes[-1]] = tensors  # before it there may be states, which stay

    def _attended(self, task: Task, state: StreamedState) -> Tensor:
        micro_batch, activations = state.micro_batch(task), self._on_device(task)
        count, split = micro_batch.num_tokens, micro_batch.num_host_tokens
        if not split or activations.has_one_form:
            return activations.result(0, count)
        absorbed_TX, decoder = activations.absorbed_result(split), self._decoder(state)
        if split == count:
            return decoder.up_project(task.layer, absorbed_TX)
        from_device_TX = activations.result(split, count)
        result_TX = from_device_TX.new_empty(count, from_device_TX.shape[1])
        decoder.up_project(task.layer, absorbed_TX, result_TX[:split])
        result_TX[split:].copy_(from_device_TX)
        return result_TX

    def _decoder(self, state: StreamedState) -> Decoder:
        return self.decoders[state.form.first_slot]

    def _cache(self, task: Task) -> Tensor:
        return self.kv[task.layer]

    def _staged(self, task: Task) -> Tensor:
        return self.device.staged_kv(_key_of(task, _STAGED), task.layer)

    def _on_device(self, task: Task) -> LayerActivations:
        return self.device.ring[_key_of(task, _RINGED)].layer(task.layer)

    def _on_host(self, task: Task) -> LayerActivations:
        return self.host.ring[_key_of(task, _RINGED)].layer(task.layer)


def _keys_of(buffers: Iterable[Buffer], names: frozenset[str]) -> list[int]:
    return [buffer.key[0] for buffer in buffers if buffer.name in names]


def _key_of(task: Task, names: frozenset[str]) -> int:
    (key,) = {buffer.key for buffer in (*task.reads, *task.writes) if buffer.name in names}
    return key[0]
