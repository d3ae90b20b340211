"""Op -> callable: what each task of a schedule does to the state of a step."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from raymoe.device.mover import Copies
from raymoe.device.threads import torch_on_all_cores
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_experts import ExpertGroup
from raymoe.kernels.elementwise import Routing, choose, triton_runs_on
from raymoe.kernels.paged_kv import largest_layout
from raymoe.memory.activations import HostActivations, LayerActivations, StepActivations
from raymoe.memory.kv_cache import KvCache
from raymoe.memory.weight_pages import WeightPages
from raymoe.model.decoder import Decoder, Posted, Projected, StagedStep
from raymoe.model.feed_forward import HostExperts
from raymoe.runtime.executor import Bindings
from raymoe.runtime.micro_batches import CutStep, MicroBatch
from raymoe.schedule.graph import Buffer, Op, Task
from raymoe.schedule.placement import LayerPlacement
from raymoe.schedule.program import StepForm
from raymoe.schedule.timeline import Timeline

LOGIT_CHUNK_ROWS = 256


class TokenChoice(NamedTuple):
    """How tokens are chosen where the logits are.

    Attributes:
        draws_R4: As `elementwise.pack_draws` makes them, of each row of logits.
        needs_logits_R: bool, rows for which the host chooses, or reads the logits.
    """

    draws_R4: Tensor
    needs_logits_R: Tensor


class ChosenRows(NamedTuple):
    """Rows of logits of which most stayed on the device.

    Attributes:
        tokens_C: int32, the token of each row; that of `rows` means nothing.
        rows_N: int64, those that the host needs, and `logits_NV` of them.
    """

    tokens_C: Tensor
    rows_N: Tensor
    logits_NV: Tensor


# First row, and logits [C, V] or chosen tokens of at most `LOGIT_CHUNK_ROWS` rows.
Logits = tuple[int, Tensor | ChosenRows]
StepRun = Generator[Logits, None, Timeline]  # yields logits in order, returns what was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The tokens of one step, ragged over sequences.

    Attributes:
        positions: int32 [T], position of each token in its sequence.
        prompt_tokens: int32 [T], prompt length of each token's sequence; where the decoder needs
            it (`Decoder.needs_prompt_tokens`).
        attention: Which tokens belong to which sequence, and its KV blocks.
        logit_rows: int64 [R], ascending: tokens of the step whose logits are wanted.
        choice: Tells how a device may choose tokens itself, and is called only for a device that
            does; None if all logits are wanted.
        state_copies: (from, to) slots whose states are copied first, in this order.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    logit_rows: Tensor
    prompt_tokens: Tensor | None = None
    choice: Callable[[], TokenChoice] | None = None
    state_copies: Sequence[tuple[int, int]] = ()

    @property
    def num_positions(self) -> int:
        """All tokens of the step have smaller positions."""
        return int(self.attention.context_tokens.max()) if len(self.token_ids) else 0


@dataclass(slots=True)
class StepState:
    """What lives between the tasks of one step; every field is owned by the step.

    Attributes:
        paged: The sequences as indices on a device that holds KV cache and states.
    """

    inputs: StepInputs
    paged: StagedStep | None = None
    hidden_TH: Tensor | None = None
    projected: Projected | None = None
    attention_TX: Tensor | None = None
    normed_TH: Tensor | None = None
    routing: Routing | None = None


Attend = Callable[[int, Projected, StepState], Tensor]


def bind_cpu(decoder: Decoder, cache: KvCache) -> Bindings[StepState]:
    """Bindings of the device `cpu`: every operation in place, on host memory."""

    def attend(layer: int, projected: Projected, state: StepState) -> Tensor:
        return decoder.attend(layer, projected, cache.layer(layer), state.inputs.attention)

    return bind_in_place(decoder, attend)


def bind_in_place(decoder: Decoder, attend_layer: Attend) -> Bindings[StepState]:
    """Bindings where weights, KV cache and work are in one memory.

    Args:
        attend_layer: Appends to the cache of a layer and attends.
    """

    def embed(_task: Task, state: StepState) -> None:
        state.hidden_TH = decoder.embed(state.inputs.token_ids)

    def pre(task: Task, state: StepState) -> None:
        assert state.hidden_TH is not None
        inputs = state.inputs
        state.projected = decoder.pre(
            task.layer, state.hidden_TH, inputs.positions, inputs.prompt_tokens
        )

    def attend(task: Task, state: StepState) -> None:
        assert state.projected is not None
        state.attention_TX = attend_layer(task.layer, state.projected, state)
        state.projected = None

    def post(task: Task, state: StepState) -> None:
        assert state.hidden_TH is not None
        assert state.attention_TX is not None
        state.hidden_TH, state.normed_TH, state.routing = decoder.post(
            task.layer, state.hidden_TH, state.attention_TX
        )
        state.attention_TX = None

    def experts(task: Task, state: StepState) -> None:
        assert state.hidden_TH is not None
        assert state.normed_TH is not None
        state.hidden_TH = decoder.ffn(task.layer, state.hidden_TH, state.normed_TH, state.routing)

    def head(_task: Task, state: StepState) -> Iterator[Logits]:
        assert state.hidden_TH is not None
        final_RH = decoder.final(state.hidden_TH, state.inputs.logit_rows)
        return _logits(decoder, final_RH, state.inputs.choice)

    return {
        Op.EMBED: embed,
        Op.PRE: pre,
        Op.ATTN: attend,
        Op.POST: post,
        Op.EXPERTS: experts,
        Op.HEAD: head,
    }


def _logits(
    decoder: Decoder, final_RH: Tensor, choice_of: Callable[[], TokenChoice] | None
) -> Iterator[Logits]:
    """In chunks: the logits of a whole prompt are never held at once."""
    choice = None
    if choice_of is not None and triton_runs_on(final_RH.device):
        choice = choice_of()
    draws_R4 = None if choice is None else choice.draws_R4.to(final_RH.device)
    for begin in range(0, final_RH.shape[0], LOGIT_CHUNK_ROWS):
        chunk = slice(begin, begin + LOGIT_CHUNK_ROWS)
        logits_CV = decoder.logits(final_RH[chunk])
        if choice is None or draws_R4 is None or bool(choice.needs_logits_R[chunk].all()):
            yield begin, _on_host(logits_CV)
            continue
        tokens_C = choose(logits_CV, draws_R4[chunk])
        rows_N = choice.needs_logits_R[chunk].nonzero()[:, 0]
        wanted_NV = logits_CV[rows_N.to(logits_CV.device)] if len(rows_N) else logits_CV[:0]
        yield begin, ChosenRows(_on_host(tokens_C), rows_N, _on_host(wanted_NV))


def _on_host(tensor: Tensor) -> Tensor:
    """Wait for a tensor and copy it from a GPU to pinned memory, which torch keeps for the next."""
    if not tensor.is_cuda:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


_RINGED = frozenset(("qkv", "host_qkv", "host_attention", "attention", "device_attention"))
_STAGED = frozenset(("staged_kv",))
_TOKENS = frozenset(("hidden", "expert_sum"))
_ROWS = frozenset(("routed", "host_rows", "host_sum"))
_RETURNED = frozenset(("returned_sum",))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Everything that the bindings work on.

    Attributes:
        top_k: Experts per token of each layer; 0 where it has none.
        expert_groups: The experts of each group, per layer; empty where they are computed at once.
        host_experts: Those of each layer that cores may compute; None where there are none.
        decoders: The model over the slots, by the slot of layer 0.
        cache: KV of all sequences, on the host.
        states: States of all sequences by layer; empty for layers with KV, and where the host has
            them.
        host: Activations on the host; its ring is as long as that of the device.
        staging: Pinned pages between pageable memory and the device; empty if nothing is staged.
        is_cache_pinned: Whether the KV cache is page-locked.
    """

    top_k: tuple[int, ...]
    expert_groups: tuple[tuple[range, ...], ...]
    host_experts: tuple[HostExperts | None, ...]
    decoders: tuple[Decoder, Decoder]
    weights: WeightPages
    cache: KvCache
    states: Sequence[Tensor]
    device: StepActivations
    host: HostActivations
    staging: Sequence[Tensor]
    is_cache_pinned: bool


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """What of a step the device has to know, in micro-batch order.

    Attributes:
        prompt_tokens_T: int32; None where the decoder does not need it.
        logit_places_R: int64, tokens whose logits are wanted, in the order of the original step.
        staged: Of each micro-batch, the sequences for which the device attends.
    """

    positions_T: Tensor
    prompt_tokens_T: Tensor | None
    logit_places_R: Tensor
    staged: tuple[StagedStep, ...]

    @classmethod
    def of(
        cls, inputs: StepInputs, cut: CutStep, memory: "DeviceMemory", device: torch.device
    ) -> Self:
        decoder, layout = memory.decoders[0], largest_layout(memory.cache.layouts)
        has_states = any(len(states) for states in memory.states)
        prompt_tokens_T = inputs.prompt_tokens
        if prompt_tokens_T is not None:
            prompt_tokens_T = prompt_tokens_T[cut.order_T].to(device)
        return cls(
            inputs.positions[cut.order_T].to(device),
            prompt_tokens_T,
            cut.place_T[inputs.logit_rows].to(device),
            tuple(
                decoder.staged_batch(
                    micro_batch.staging.batch,
                    layout,
                    device,
                    with_states=micro_batch.batch if has_states else None,
                )
                for micro_batch in cut.micro_batches
            ),
        )


@dataclass(slots=True)
class DeviceStep:
    """One step.

    Attributes:
        on_device: What the device has to know of it.
        used: Device memory of the buffers that were written last.
    """

    inputs: StepInputs
    cut: CutStep
    form: StepForm
    on_device: DeviceInputs
    used: dict[Buffer, tuple[Tensor, ...]] = field(default_factory=dict)

    def micro_batch(self, task: Task) -> MicroBatch:
        return self.cut.micro_batches[task.part]

    def rows(self, micro_batches: Sequence[int]) -> slice:
        """Tokens of neighbouring micro-batches."""
        first, last = (self.cut.micro_batches[micro_batches[place]] for place in (0, -1))
        return slice(first.begin, last.end)


def bind_device(memory: DeviceMemory) -> Bindings[DeviceStep]:
    bound = _Bound(memory)
    return {
        Op.EMBED: bound.embed,
        Op.UP: bound.up,
        Op.PRE: bound.pre,
        Op.QKV: bound.qkv,
        Op.ATTN: bound.attend_on_host,
        Op.APPEND: bound.append,
        Op.KV: bound.stage_kv,
        Op.GATTN: bound.attend_on_device,
        Op.HID: bound.hid,
        Op.POST: bound.post,
        Op.ROWS: bound.send_rows,
        Op.CEXPERTS: bound.experts_on_host,
        Op.SUMS: bound.return_sums,
        Op.EXPERTS: bound.experts,
        Op.HEAD: bound.head,
        Op.W: bound.load_page,
        Op.STAGE: bound.stage_page,
        Op.SYNC: bound.sync,
    }


def poison_dead(poison: Callable[[Tensor], None]) -> Callable[[Buffer, DeviceStep], None]:
    """What to do with buffers that nobody will read: whoever reads them after all shows."""

    @torch.inference_mode()
    def on_dead(buffer: Buffer, state: DeviceStep) -> None:
        for tensor in state.used.pop(buffer, ()):
            poison(tensor)

    return on_dead


class _Bound:
    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def embed(self, task: Task, state: DeviceStep) -> None:
        rows = state.micro_batch(task).rows
        token_ids_T = state.inputs.token_ids[state.cut.order_T[rows]]
        self._memory.host.embedded_TH[rows].copy_(self._decoder(state).embed(token_ids_T))

    def up(self, task: Task, state: DeviceStep) -> Copies:
        rows = state.micro_batch(task).rows
        return Copies.of((self._memory.device.hidden_TH[rows], self._memory.host.embedded_TH[rows]))

    def pre(self, task: Task, state: DeviceStep) -> None:
        micro_batch, inputs = state.micro_batch(task), state.on_device
        prompt_tokens_T = inputs.prompt_tokens_T
        if prompt_tokens_T is not None:
            prompt_tokens_T = prompt_tokens_T[micro_batch.rows]
        count, split, into = micro_batch.num_tokens, micro_batch.host.end, self._on_device(task)
        is_split = split > 0 and not into.has_one_form
        out = into.projected(0, count)
        if is_split:  # the host's queries change their form, which is larger
            out = out._replace(query_THD=torch.empty_like(out.query_THD))
        query_THD, *_ = self._decoder(state).pre(
            task.layer,
            self._memory.device.hidden_TH[micro_batch.rows],
            inputs.positions_T[micro_batch.rows],
            prompt_tokens_T,
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

    def qkv(self, task: Task, state: DeviceStep) -> Copies:
        micro_batch = state.micro_batch(task)
        target, source = self._on_host(task), self._on_device(task)
        end, num_tokens = micro_batch.host.end, micro_batch.num_tokens
        return Copies.of(
            (target.absorbed(end).query_THD, source.absorbed(end).query_THD),
            *zip(target.cached(0, num_tokens), source.cached(0, num_tokens), strict=True),
        )

    def attend_on_host(self, task: Task, state: DeviceStep) -> None:
        share, activations = state.micro_batch(task).host, self._on_host(task)
        result_TX = self._decoder(state).attend_absorbed(
            task.layer, activations.absorbed(share.end), self._cache(task), share.batch
        )
        activations.absorbed_result(share.end).copy_(result_TX)

    def append(self, task: Task, state: DeviceStep) -> None:
        share = state.micro_batch(task).device
        projected = self._on_host(task).projected(share.begin, share.end)
        self._decoder(state).append(task.layer, projected, self._cache(task), share.batch)

    def stage_kv(self, task: Task, state: DeviceStep) -> Copies:
        staging = state.micro_batch(task).staging
        staged, cache = self._staged(task), self._cache(task)
        copies = Copies.of_runs(
            staged, cache, staging.runs_N3, is_pinned=self._memory.is_cache_pinned
        )
        return self._writing(task, state, copies, staged[: staging.num_blocks])

    def attend_on_device(self, task: Task, state: DeviceStep) -> None:
        micro_batch, activations = state.micro_batch(task), self._on_device(task)
        states = self._memory.states[task.layer]
        begin = 0 if len(states) else micro_batch.device.begin
        into = activations.result(begin, micro_batch.num_tokens)
        self._decoder(state).attend_staged(
            task.layer,
            activations.projected(begin, micro_batch.num_tokens),
            states if len(states) else self._staged(task),
            state.on_device.staged[task.part],
            out=into,
        )
        self._wrote(task, state, into)

    def hid(self, task: Task, state: DeviceStep) -> Copies:
        end = state.micro_batch(task).host.end
        into = self._on_device(task).absorbed_result(end)
        copies = Copies.of((into, self._on_host(task).absorbed_result(end)))
        return self._writing(task, state, copies, into)

    def post(self, task: Task, state: DeviceStep) -> None:
        rows, device = state.micro_batch(task).rows, self._memory.device
        top_k = self._memory.top_k[task.layer]
        routing = device.routing(rows, top_k) if top_k else None
        out = Posted(device.hidden_TH[rows], device.normed_TH[rows], routing)
        self._decoder(state).post(task.layer, out.hidden_TH, self._attended(task, state), out)
        used = [out.normed_TH, *(routing or ())]
        latent_TL = self._latent(task.layer, rows)
        if latent_TL is not None:
            used.append(self._decoder(state).to_latent(task.layer, out.normed_TH, latent_TL))
        state.used[Buffer("routed", (task.part,))] = tuple(used)

    def _latent(self, layer: int, rows: slice) -> Tensor | None:
        """Where the experts of a layer read a latent of these tokens; None if they read none."""
        latent_TL = self._memory.device.latent_TL
        return latent_TL[rows] if latent_TL is not None and self._memory.top_k[layer] else None

    def send_rows(self, task: Task, state: DeviceStep) -> Copies:
        device, host = self._memory.device, self._memory.host
        experts = self._memory.host_experts[task.layer]
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

    def experts_on_host(self, task: Task, state: DeviceStep) -> None:
        host, layer = self._memory.host, task.layer
        experts = self._memory.host_experts[layer]
        assert experts is not None
        rows = state.rows(_keys_of(task.reads, _ROWS))
        group = ExpertGroup(state.form.layers[layer].host_experts, host.sum_TL[rows].zero_())
        routing = host.routing(rows, self._memory.top_k[layer])
        # The lanes' threads may have another number of torch threads.
        with torch_on_all_cores() if experts.uses_torch else nullcontext():
            experts.add(host.rows_TL[rows], routing, group)

    def return_sums(self, task: Task, state: DeviceStep) -> Copies:
        rows = state.rows(_keys_of(task.reads, _ROWS))
        source_TL = self._memory.host.sum_TL[rows]
        into = self._memory.device.returned_sum(_key_of(task, _RETURNED), len(source_TL))
        return self._writing(task, state, Copies.of((into, source_TL)), into)

    def experts(self, task: Task, state: DeviceStep) -> None:
        device, layer, decoder = self._memory.device, task.layer, self._decoder(state)
        micro_batches = _keys_of(task.writes, _TOKENS)
        rows = state.rows(micro_batches)
        hidden_TH, normed_TH = device.hidden_TH[rows], device.normed_TH[rows]
        latent_TL = self._latent(layer, rows)
        chosen: Routing | Tensor | None = None
        if top_k := self._memory.top_k[layer]:
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
        decoder.ffn(layer, hidden_TH, normed_TH, chosen, latent_TL=latent_TL)

    def _experts_of(self, layer: int, group: int, pages: LayerPlacement) -> range:
        """Experts of a group that the device computes."""
        groups, on_host = self._memory.expert_groups[layer], pages.host_experts
        if not pages.group_pages:
            return range(on_host.start)
        end = on_host.start if on_host else groups[group].stop
        return range(groups[group].start, min(groups[group].stop, end))

    def head(self, _task: Task, state: DeviceStep) -> Iterator[Logits]:
        decoder = self._decoder(state)
        hidden_TH, rows_R = self._memory.device.hidden_TH, state.on_device.logit_places_R
        return _logits(decoder, decoder.final(hidden_TH, rows_R), state.inputs.choice)

    def load_page(self, task: Task, state: DeviceStep) -> Copies:
        weights = self._memory.weights
        slot, _ = task.writes[0].key
        source = weights.host_page(task.layer, task.part)
        staged = next((buffer for buffer in task.reads if buffer.name == "staging"), None)
        if staged is not None:
            source = self._memory.staging[staged.key[0]][: len(source)]
        into = weights.slot_page(task.layer, task.part, slot)
        return self._writing(task, state, Copies.of((into, source)), into)

    def stage_page(self, task: Task, _state: DeviceStep) -> None:
        source = self._memory.weights.host_page(task.layer, task.part)
        (slot,) = task.writes[0].key
        self._memory.staging[slot][: len(source)].copy_(source)

    def sync(self, task: Task, state: DeviceStep) -> None:
        """Nothing: the schedule's dependencies are the wait."""

    def _writing(self, task: Task, state: DeviceStep, copies: Copies, *tensors: Tensor) -> Copies:
        copies.record = partial(self._wrote, task, state, *tensors)
        return copies

    def _wrote(self, task: Task, state: DeviceStep, *tensors: Tensor) -> None:
        state.used[task.writes[-1]] = tensors  # before it there may be states, which stay

    def _attended(self, task: Task, state: DeviceStep) -> Tensor:
        micro_batch, activations = state.micro_batch(task), self._on_device(task)
        count, split = micro_batch.num_tokens, micro_batch.host.end
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

    def _decoder(self, state: DeviceStep) -> Decoder:
        return self._memory.decoders[state.form.first_slot]

    def _cache(self, task: Task) -> Tensor:
        return self._memory.cache.layer(task.layer)

    def _staged(self, task: Task) -> Tensor:
        return self._memory.device.staged_kv(_key_of(task, _STAGED), task.layer)

    def _on_device(self, task: Task) -> LayerActivations:
        return self._memory.device.ring[_key_of(task, _RINGED)].layer(task.layer)

    def _on_host(self, task: Task) -> LayerActivations:
        return self._memory.host.ring[_key_of(task, _RINGED)].layer(task.layer)


def _keys_of(buffers: Iterable[Buffer], names: frozenset[str]) -> list[int]:
    return [buffer.key[0] for buffer in buffers if buffer.name in names]


def _key_of(task: Task, names: frozenset[str]) -> int:
    (key,) = {buffer.key for buffer in (*task.reads, *task.writes) if buffer.name in names}
    return key[0]


def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for from_tensor, to_tensor in zip(source, target, strict=True):
        _send(from_tensor, to_tensor)


def _send(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)
