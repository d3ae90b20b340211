"""Op -> callable: what each task of a schedule does to the state of a pass."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.device_attention_batch import StagedBatch
from raymoe.memory.kv_cache import KvCache
from raymoe.model.decoder import Decoder, Projected, Routing
from raymoe.runtime.executor import Bindings
from raymoe.schedule.graph import Op, Task

LOGIT_CHUNK_ROWS = 256

OnLogits = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInputs:
    """The tokens of one pass, ragged over sequences.

    Attributes:
        token_ids: int64 [T].
        positions: int32 [T], position of each token in its sequence.
        prompt_tokens: int32 [T], prompt length of each token's sequence; where the decoder needs
            it (`Decoder.needs_prompt_tokens`).
        attention: Which tokens belong to which sequence, and its KV blocks.
        logit_rows: int64 [R], ascending: tokens of the pass whose logits are wanted.
        on_logits: Called with (first row, logits [C, V]) for chunks of at most
            `LOGIT_CHUNK_ROWS` rows in order, so that the logits of a whole prompt are never held
            at once.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    logit_rows: Tensor
    on_logits: OnLogits
    prompt_tokens: Tensor | None = None

    @property
    def num_positions(self) -> int:
        """All tokens of the pass have smaller positions."""
        return int(self.attention.context_tokens.max()) if len(self.token_ids) else 0


@dataclass(slots=True)
class PassState:
    """What lives between the tasks of one pass; every field is owned by the pass.

    Attributes:
        paged: The sequences as indices on a device that holds the KV cache.
    """

    inputs: PassInputs
    paged: StagedBatch | None = None
    hidden_TH: Tensor | None = None
    projected: Projected | None = None
    attention_TX: Tensor | None = None
    normed_TH: Tensor | None = None
    routing: Routing | None = None


Attend = Callable[[int, Projected, PassState], Tensor]


def bind_cpu(decoder: Decoder, cache: KvCache) -> Bindings[PassState]:
    """Bindings of the device `cpu`: every operation in place, on host memory."""

    def attend(layer: int, projected: Projected, state: PassState) -> Tensor:
        return decoder.attend(layer, projected, cache.layer(layer), state.inputs.attention)

    return bind_in_place(decoder, attend)


def bind_in_place(decoder: Decoder, attend_layer: Attend) -> Bindings[PassState]:
    """Bindings where weights, KV cache and work are in one memory.

    Args:
        decoder: The model.
        attend_layer: Appends to the cache of a layer and attends.
    """

    def embed(_task: Task, state: PassState) -> None:
        state.hidden_TH = decoder.embed(state.inputs.token_ids)

    def pre(task: Task, state: PassState) -> None:
        assert state.hidden_TH is not None
        inputs = state.inputs
        state.projected = decoder.pre(
            task.layer, state.hidden_TH, inputs.positions, inputs.prompt_tokens
        )

    def attend(task: Task, state: PassState) -> None:
        assert state.projected is not None
        state.attention_TX = attend_layer(task.layer, state.projected, state)
        state.projected = None

    def post(task: Task, state: PassState) -> None:
        assert state.hidden_TH is not None
        assert state.attention_TX is not None
        state.hidden_TH, state.normed_TH, state.routing = decoder.post(
            task.layer, state.hidden_TH, state.attention_TX
        )
        state.attention_TX = None

    def experts(task: Task, state: PassState) -> None:
        assert state.hidden_TH is not None
        assert state.normed_TH is not None
        state.hidden_TH = decoder.ffn(task.layer, state.hidden_TH, state.normed_TH, state.routing)

    def head(_task: Task, state: PassState) -> None:
        assert state.hidden_TH is not None
        final_RH = decoder.final(state.hidden_TH, state.inputs.logit_rows)
        for begin in range(0, final_RH.shape[0], LOGIT_CHUNK_ROWS):
            chunk_CH = final_RH[begin : begin + LOGIT_CHUNK_ROWS]
            state.inputs.on_logits(begin, decoder.logits(chunk_CH).cpu())

    return {
        Op.EMBED: embed,
        Op.PRE: pre,
        Op.ATTN: attend,
        Op.POST: post,
        Op.EXPERTS: experts,
        Op.HEAD: head,
    }
