"""The decoder: embedding, layers and head.

T tokens, H hidden size, L width of what experts read: their latent, or the hidden size. The hidden
state between blocks, `hidden_TH`, may have several streams of H columns each, and F factors.
"""

import itertools
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.errors import ConfigError
from raymoe.kernels.compressed import CompressedBatches
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_experts import ExpertGroup
from raymoe.kernels.cpu_linear import Allocate, Linear
from raymoe.kernels.elementwise import Projected, Routing
from raymoe.kernels.gpu_attention_batch import StagedBatch
from raymoe.kernels.gpu_state.scan import StateBatch
from raymoe.kernels.paged_kv import CacheLayout
from raymoe.kernels.selection import sees_more_than
from raymoe.model.attention import (
    Attention,
    LatentAttention,
    LayerAttention,
    grouped_layout,
    latent_layout,
)
from raymoe.model.compressed import CompressedAttention, compressed_layout, staged_batches
from raymoe.model.feed_forward import Dense, FeedForward, MoE
from raymoe.model.loading import GetWeight, Loader, NormOverRanks, Reduce, keep
from raymoe.model.ngrams import Ngrams, ngram_layout
from raymoe.model.norms import HeadLayerNorms, Norm, NormHeads, load_norm
from raymoe.model.recurrent import Stateful, load_recurrent, state_layout
from raymoe.model.rope import Rotary
from raymoe.model.streams import Mixer, load_merge, load_mixers, merge, spread
from raymoe.specs.attention.compressed import CompressedAttentionSpec
from raymoe.specs.attention.grouped import AttentionSpec
from raymoe.specs.attention.kind import AttentionKind
from raymoe.specs.attention.latent import LatentAttentionSpec
from raymoe.specs.attention.ngrams import NgramLayerSpec
from raymoe.specs.attention.recurrent import RECURRENT, RecurrentSpec
from raymoe.specs.layer_weights import (
    ATTENTION_RESULT_NORM,
    EMBEDDING,
    FFN_NORM,
    FFN_RESULT_NORM,
    FINAL_NORM,
    HEAD,
    HEAD_BIAS,
    INPUT_NORM,
    LAYER_SCALAR,
    layer_prefix,
    layer_weights,
)
from raymoe.specs.model import ModelSpec, MoeSpec


def cache_layouts(
    spec: ModelSpec, kv_dtype: torch.dtype, dtype: torch.dtype | None = None
) -> tuple[CacheLayout, ...]:
    """The layout of each layer's cache.

    Args:
        dtype: Type of activations, of which layers with states keep the latest; `kv_dtype` if None.
    """
    return tuple(_layout(layer.attention, kv_dtype, dtype or kv_dtype) for layer in spec.layers)


def _layout(attention: AttentionKind, kv_dtype: torch.dtype, dtype: torch.dtype) -> CacheLayout:
    if isinstance(attention, RecurrentSpec):
        return state_layout(attention, dtype)
    if isinstance(attention, NgramLayerSpec):
        return ngram_layout(attention, dtype)
    if isinstance(attention, CompressedAttentionSpec):
        if kv_dtype != dtype:
            raise ConfigError(
                f"kv_dtype is {kv_dtype} and the model computes in {dtype}; rows and entries of "
                "this attention have the type of the model: leave kv_dtype at 'auto'"
            )
        return compressed_layout(attention, dtype)
    if isinstance(attention, LatentAttentionSpec):
        return latent_layout(attention, kv_dtype)
    assert isinstance(attention, AttentionSpec), "the last kind"
    return grouped_layout(attention, kv_dtype)


Release = Callable[[Iterable[str]], None]

__all__ = ["Decoder", "Posted", "Projected", "Routing"]


class Posted(NamedTuple):
    """Output of `Decoder.post`.

    Attributes:
        normed_TH: The norm of the hidden state.
        routing: The experts of each token; None in a layer without experts.
        factors_TF: float32, by which `Decoder.ffn` adds to several streams; None for one.
    """

    hidden_TH: Tensor
    normed_TH: Tensor
    routing: Routing | None
    factors_TF: Tensor | None = None


class StagedRows(NamedTuple):
    """The sequences for which the device attends, as indices; None where no layer needs them.

    Attributes:
        kv: For layers with KV.
        states: For layers that keep states.
        chunked: For layers that attend within chunks, where some sequence is longer than one.
        windowed: For layers with a sliding window, if these have blocks of their own.
    """

    kv: StagedBatch | None
    states: StateBatch | CompressedBatches | None
    chunked: StagedBatch | None = None
    windowed: StagedBatch | None = None


class Layer:
    def __init__(
        self,
        model: ModelSpec,
        i: int,
        loader: Loader,
        reduce: Reduce,
        *,
        rotaries: tuple[Rotary, Rotary],
    ) -> None:
        """`rotaries` are that of the device of the weights and that of the host."""
        spec, prefix = model.layers[i], layer_prefix(i)

        def norm(name: str, *, exists: bool) -> Norm | None:
            return load_norm(model, loader, f"{prefix}{name}") if exists else None

        self.input_norm = norm(INPUT_NORM, exists=spec.norms.before_attention)
        if isinstance(spec.attention, CompressedAttentionSpec):
            self.attention: LayerAttention | Stateful | CompressedAttention = CompressedAttention(
                spec.attention, loader, f"{prefix}self_attn.", rotaries
            )
        else:
            self.attention = _attention(model, i, loader, reduce, rotaries=rotaries)
        self.is_parallel = spec.is_parallel
        self.reads_input_again = spec.is_parallel or spec.attention.has_gate
        self.result_norm = norm(ATTENTION_RESULT_NORM, exists=spec.norms.after_attention)
        self.ffn_norm = norm(FFN_NORM, exists=spec.norms.before_ffn)
        self.ffn_result_norm = norm(FFN_RESULT_NORM, exists=spec.norms.after_ffn)
        self.mixers: tuple[Mixer, Mixer] | None = None
        if spec.mixed_streams is not None:
            self.mixers = load_mixers(spec.mixed_streams, loader, prefix)
        self.ffn: FeedForward | None = None
        if isinstance(spec.ffn, MoeSpec):
            self.ffn = MoE(model, spec.ffn, loader, prefix)
        elif spec.has_network:
            self.ffn = Dense(spec.ffn, loader, f"{prefix}mlp.")
        self.scalar_1 = loader.vector(f"{prefix}{LAYER_SCALAR}") if spec.has_scalar else None

    def attention_factors(self, hidden_TH: Tensor) -> Tensor | None:
        """Factors of the streams that attention reads, [T, F]; None of a single stream."""
        return None if self.mixers is None else self.mixers[0].factors(hidden_TH)

    def attention_input(self, hidden_TH: Tensor, factors_TF: Tensor | None) -> Tensor:
        if self.mixers is not None and factors_TF is not None:
            hidden_TH = self.mixers[0].read(hidden_TH, factors_TF)
        return hidden_TH if self.input_norm is None else self.input_norm(hidden_TH)

    def ffn_input(self, hidden_TH: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the network reads of several streams, and its factors, in `out`."""
        assert self.mixers is not None, "the hidden state is one stream"
        _, mixer = self.mixers
        factors_TF = mixer.factors(hidden_TH, out)
        input_TH = mixer.read(hidden_TH, factors_TF)
        return input_TH if self.ffn_norm is None else self.ffn_norm(input_TH), factors_TF


def _attention(
    model: ModelSpec, i: int, loader: Loader, reduce: Reduce, *, rotaries: tuple[Rotary, Rotary]
) -> LayerAttention | Stateful:
    spec, prefix = model.layers[i].attention, f"{layer_prefix(i)}self_attn."
    if isinstance(spec, NgramLayerSpec):
        num_streams = model.residual_size // model.hidden_size
        return Ngrams(spec, loader, layer_prefix(i), num_streams=num_streams)
    if isinstance(spec, RecurrentSpec):
        return load_recurrent(spec, loader, layer_prefix(i) + RECURRENT)
    rope = model.layers[i].rope
    is_interleaved = rope is not None and rope.is_interleaved
    if isinstance(spec, LatentAttentionSpec):
        return LatentAttention(spec, loader, prefix, is_interleaved=is_interleaved)
    assert isinstance(spec, AttentionSpec), "the only other kind without rows of its own"
    norm_heads: NormHeads | None = None
    if spec.qk_norm == "full" and model.num_shards > 1:
        norm_heads = NormOverRanks(reduce, model.num_shards, model.norm_eps, model.norm_offset)
    elif spec.qk_norm == "layer":
        norm_heads = HeadLayerNorms(model.norm_eps)
    return Attention(
        spec,
        loader,
        prefix,
        eps=model.norm_eps,
        norm_offset=model.norm_offset,
        is_interleaved=is_interleaved,
        rotaries=rotaries,
        norm_heads=norm_heads,
    )


class Decoder:
    """A model whose operations work on the ragged batch of tokens of one step.

    Operations run where their weights are; the embedding runs on the host. `post` and `ffn` change
    the hidden state in place and return it. Operations that take `out` write their results there.

    Attributes:
        dtype: Type of hidden states and logits.
        needs_prompt_tokens: Whether `pre` needs the prompt length of each token.
    """

    def __init__(
        self, spec: ModelSpec, loader: Loader, release: Release, *, reduce: Reduce = keep
    ) -> None:
        self.spec, self.dtype = spec, loader.dtype
        self._reduce = reduce
        self.needs_prompt_tokens = spec.depends_on_length
        rotary = {layer.rope: Rotary(layer.rope, loader.device) for layer in spec.layers}
        self._rotary = [rotary[layer.rope] for layer in spec.layers]
        if loader.device != torch.device("cpu") and any(
            layer.attention.rotates_entries for layer in spec.layers
        ):
            rotary = {layer.rope: Rotary(layer.rope) for layer in spec.layers}
        self._host_rotary = [rotary[layer.rope] for layer in spec.layers]
        self._embedding_VH = loader.table(EMBEDDING)
        multiplier = torch.tensor(spec.embedding_multiplier, dtype=torch.float64)
        if spec.rounds_embedding_multiplier:
            multiplier = multiplier.to(self.dtype)
        self._embedding_multiplier = float(multiplier)
        self._layers: list[Layer] = []
        for i, layer in enumerate(spec.layers):
            rotaries = self._rotary[i], self._host_rotary[i]
            self._layers.append(Layer(spec, i, loader, reduce, rotaries=rotaries))
            release([layer_prefix(i) + name for name in layer_weights(layer, spec.hidden_size)])
        self._merge = load_merge(spec.streams, loader)
        self._final_norm = None
        if FINAL_NORM in spec.outer_weights():
            self._final_norm = load_norm(spec, loader, FINAL_NORM.removesuffix(".weight"))
        head_bias = HEAD_BIAS if spec.has_head_bias else None
        self._head: Linear | None = None
        if spec.tie_word_embeddings:
            self._head = loader.tied_linear(self._embedding_VH, head_bias)
        elif spec.head != "none":
            self._head = loader.linear([HEAD.removesuffix(".weight")], has_bias=spec.has_head_bias)
            release([HEAD])

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        weights: GetWeight,
        allocate: Allocate,
        dtype: torch.dtype,
        *,
        release: Release = lambda _names: None,
        reduce: Reduce = keep,
    ) -> Self:
        """Build the decoder layer by layer, so that at most one layer is in memory twice.

        Args:
            weights: Canonical name (`specs.weight_names`) -> tensor; may be a view of a file.
            allocate: Provides memory for copies, `decoder_arena_bytes` in all.
            dtype: Compute type; weights of another type are converted.
            release: Called with the names of each layer once it is built, so that the memory of
                copied originals can be freed.
            reduce: All-reduce over the ranks if `spec` is one rank's shard (`specs.tensor_shards`).
                It sums what attention and FFN add to the hidden state, and the squares of queries
                and keys whose norms span all heads.
        """
        return cls(spec, Loader(weights, allocate, dtype), release, reduce=reduce)

    def reserve(self, num_positions: int) -> None:
        """Prepare `pre` for positions below `num_positions`; call it between steps."""
        for rotary in (*self._rotary, *self._host_rotary):
            rotary.reserve(num_positions)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        hidden_TH = functional.embedding(token_ids_T, self._embedding_VH)
        if self._embedding_multiplier != 1:
            hidden_TH *= self._embedding_multiplier
        return spread(hidden_TH, self.spec.streams)

    def pre(
        self,
        i: int,
        hidden_TH: Tensor,
        positions_T: Tensor,
        prompt_tokens_T: Tensor | None = None,
        *,
        ngrams_NTE: Tensor | None = None,
        out: Projected | None = None,
    ) -> Projected:
        """Compute norm, projection and rotation of layer `i`.

        Args:
            ngrams_NTE: What `ngrams_of_tokens` has read of these tokens.
            positions_T: int32, position of each token in its sequence; `reserve` covers it.
            prompt_tokens_T: int32, prompt length of each token's sequence; needed if
                `needs_prompt_tokens` (`model.rope` explains why).
            out: Contiguous tensors that receive the result.
        """
        layer = self._layers[i]
        rotary = self._rotary[i]
        angles = rotary.angles(positions_T, prompt_tokens_T)
        if isinstance(layer.attention, Ngrams):
            assert ngrams_NTE is not None, "this layer reads them"
            input_TH = layer.attention.gate(hidden_TH, ngrams_NTE[self._ngram_places[i]])
        else:
            input_TH = layer.attention_input(hidden_TH, layer.attention_factors(hidden_TH))
        projected = layer.attention.project(input_TH, angles, out)
        rotary.scale_queries_(projected.query_THD, positions_T)
        return projected

    def attend(
        self, i: int, projected: Projected, cache_layer: Tensor, batch: AttentionBatch
    ) -> Tensor:
        return self._layers[i].attention.attend(projected, cache_layer, self._of_layer(i, batch))

    def staged_batch(
        self,
        batch: AttentionBatch,
        layout: CacheLayout,
        device: torch.device,
        *,
        with_states: AttentionBatch | None,
    ) -> StagedRows:
        """Prepare a batch for `attend_staged`, once for all layers; on the host.

        Args:
            batch: Its block table is that of the staged blocks.
            device: Where the layers attend, which must get what is returned.
            with_states: Sequences whose states are on the device, or are staged there with their
                blocks; None if states are on the host.
        """
        kv = self._staging_layer
        return StagedRows(
            None if kv is None else kv.staged_batch(batch, layout, device),
            None if with_states is None else self._staged_states(with_states, device),
            None if kv is None else self._in_chunks(kv, batch, layout, device),
            None
            if kv is None or batch.windowed is None
            else kv.staged_batch(batch.windowed, layout, device),
        )

    def is_windowed(self, i: int) -> bool:
        """Whether layer `i` has a sliding window."""
        return self.spec.layers[i].attention.cache_window is not None

    def _of_layer(self, i: int, batch: AttentionBatch) -> AttentionBatch:
        """The batch with the blocks of layer `i`."""
        if batch.windowed is None or not self.is_windowed(i):
            return batch
        return batch.windowed

    def _in_chunks(
        self,
        attention: LayerAttention,
        batch: AttentionBatch,
        layout: CacheLayout,
        device: torch.device,
    ) -> StagedBatch | None:
        chunk = next(filter(None, self._chunk_tokens), None)
        if chunk is None or not sees_more_than(batch, chunk):
            return None
        return attention.staged_batch(batch.in_chunks(chunk), layout, device)

    @cached_property
    def _chunk_tokens(self) -> list[int | None]:
        """Of each layer; the chunks of all are as long."""
        return [
            layer.attention.chunk_tokens if isinstance(layer.attention, AttentionSpec) else None
            for layer in self.spec.layers
        ]

    @cached_property
    def _table_places(self) -> list[int | None]:
        """Of each layer in which token ids decide, its place among those."""
        networks, count = [layer.ffn for layer in self.spec.layers], itertools.count()
        has_table = [isinstance(ffn, MoeSpec) and ffn.router.num_token_ids > 0 for ffn in networks]
        return [next(count) if exists else None for exists in has_table]

    @cached_property
    def _ngram_places(self) -> list[int]:
        """Of each layer that reads n-grams, its place among those."""
        reads = [layer.ngrams is not None for layer in self.spec.layers]
        return [sum(reads[:i]) for i in range(len(reads))]

    def _staged_states(
        self, batch: AttentionBatch, device: torch.device
    ) -> StateBatch | CompressedBatches | None:
        attentions = [layer.attention for layer in self._layers]
        compressed = [each for each in attentions if isinstance(each, CompressedAttention)]
        if compressed:
            return staged_batches(compressed, batch, device, self.dtype)
        states = next((each for each in attentions if isinstance(each, Stateful)), None)
        return None if states is None else states.staged_batch(batch, device)

    @cached_property
    def _staging_layer(self) -> LayerAttention | None:
        """The widest layer with KV alone, which prepares a batch for all of them."""
        with_kv = [
            (spec.attention.token_shapes.value[::-1], layer.attention)
            for layer, spec in zip(self._layers, self.spec.layers, strict=True)
            if not isinstance(layer.attention, Stateful | CompressedAttention)
        ]
        return max(with_kv, key=lambda each: each[0], default=((0, 0), None))[1]

    def attend_staged(
        self,
        i: int,
        projected: Projected,
        staged: Tensor,
        batch: StagedRows,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        attention = self._layers[i].attention
        if isinstance(attention, CompressedAttention):
            assert isinstance(batch.states, CompressedBatches), "made by `staged_batch`"
            return attention.attend_staged(projected, staged, batch.states, out)
        if isinstance(attention, Stateful):
            assert isinstance(batch.states, StateBatch), "made by `staged_batch`"
            return attention.attend_staged(projected, staged, batch.states, out)
        rows = batch.kv
        if batch.chunked is not None and self._chunk_tokens[i] is not None:
            rows = batch.chunked
        if batch.windowed is not None and self.is_windowed(i):
            rows = batch.windowed
        assert rows is not None, "made by `staged_batch`"
        return attention.attend_staged(projected, staged, rows, out)

    def absorb(self, i: int, query_TAD: Tensor, out: Tensor | None = None) -> Tensor:
        return self._layers[i].attention.absorb(query_TAD, out)

    def attend_absorbed(
        self, i: int, absorbed: Projected, cache_layer: Tensor, batch: AttentionBatch
    ) -> Tensor:
        attention = self._layers[i].attention
        return attention.attend_absorbed(absorbed, cache_layer, self._of_layer(i, batch))

    def append(
        self, i: int, projected: Projected, cache_layer: Tensor, batch: AttentionBatch
    ) -> None:
        attention = self._layers[i].attention
        assert not isinstance(attention, Stateful), f"layer {i} has states, which have one home"
        attention.append(projected, cache_layer, self._of_layer(i, batch))

    def up_project(self, i: int, result_TX: Tensor, out: Tensor | None = None) -> Tensor:
        return self._layers[i].attention.up_project(result_TX, out)

    def experts_of_tokens(self, token_ids_T: Tensor) -> Tensor | None:
        """Read the experts that token ids decide, int64 [N, T, K] of N layers; on the host.

        None if they decide in no layer.
        """
        tables = [
            layer.ffn.experts_VK
            for layer in self._layers
            if isinstance(layer.ffn, MoE) and layer.ffn.experts_VK is not None
        ]
        return torch.stack([table_VK[token_ids_T] for table_VK in tables]) if tables else None

    def ngrams_of_tokens(
        self, token_ids_T: Tensor, query_start: Tensor, past_SP: Tensor | None
    ) -> Tensor | None:
        """Read the embeddings of n-grams, [N, T, E] of N layers; on the host, once per step.

        None if no layer reads them. Arguments are those of `kernels.ngrams.table_rows`.
        """
        layers = [layer.attention for layer in self._layers]
        found = [
            each.embed(token_ids_T, query_start, past_SP)
            for each in layers
            if isinstance(each, Ngrams)
        ]
        return torch.stack(found) if found else None

    def post(
        self,
        i: int,
        hidden_TH: Tensor,
        attention_TX: Tensor,
        out: Posted | None = None,
        *,
        experts_NTK: Tensor | None = None,
    ) -> Posted:
        """Compute output projection, residual, norms and router of layer `i`.

        `experts_NTK` is what `experts_of_tokens` has read of these tokens.

        Every rank routes by itself, from a sum that is bitwise equal on all ranks. Without a norm
        before the feed-forward network, the normed tensor is the hidden state itself.
        """
        layer = self._layers[i]
        # The gate of attention reads the input of attention, and so does a parallel network.
        input_TH, attention_TF = hidden_TH, layer.attention_factors(hidden_TH)
        if layer.reads_input_again:
            input_TH = layer.attention_input(hidden_TH, attention_TF)
        delta_TH = self._reduce(layer.attention.output(attention_TX, input_TH))
        if layer.result_norm is not None:
            delta_TH = layer.result_norm(delta_TH)
        if self.spec.residual_multiplier != 1:
            delta_TH *= self.spec.residual_multiplier
        _, normed_out, routing_out, factors_TF = (None,) * 4 if out is None else out
        if layer.mixers is not None and attention_TF is not None:
            layer.mixers[0].add_(hidden_TH, delta_TH, attention_TF)
            normed_TH, factors_TF = layer.ffn_input(hidden_TH, factors_TF)
            normed_TH = normed_TH if normed_out is None else normed_out.copy_(normed_TH)
        elif layer.ffn_norm is None:
            hidden_TH.add_(delta_TH)
            normed_TH = input_TH if layer.is_parallel else hidden_TH
            if normed_out is not None and layer.ffn is not None:
                normed_TH = normed_out.copy_(normed_TH)
        else:
            normed_TH = layer.ffn_norm.after_adding_(hidden_TH, delta_TH, normed_out)
        routing = None
        if layer.ffn is not None:
            ids_TK = None
            if (place := self._table_places[i]) is not None:
                assert experts_NTK is not None, "token ids decide in this layer"
                ids_TK = experts_NTK[place]
            routing = layer.ffn.route(hidden_TH, normed_TH, routing_out, ids_TK=ids_TK)
        return Posted(hidden_TH, normed_TH, routing, factors_TF)

    def to_latent(self, i: int, normed_TH: Tensor, out: Tensor | None = None) -> Tensor:
        """Project the output of `post` to what the experts of layer `i` read, [T, L], in `out`."""
        return self._experts(i).to_latent(normed_TH, out)

    def _experts(self, i: int) -> MoE:
        ffn = self._layers[i].ffn
        assert isinstance(ffn, MoE), f"layer {i} has no experts"
        return ffn

    def ffn(
        self,
        i: int,
        hidden_TH: Tensor,
        normed_TH: Tensor,
        chosen: Routing | Tensor | None,
        *,
        latent_TL: Tensor | None = None,
        factors_TF: Tensor | None = None,
    ) -> Tensor:
        """Add the experts or the dense FFN of layer `i` to the residual; [T, H].

        Args:
            chosen: The experts of each token, or the sums of all groups, [T, L].
            latent_TL: Output of `to_latent`, where the experts have a latent and it is known.
            factors_TF: Those of `post`.
        """
        layer = self._layers[i]
        if layer.ffn is None:
            return hidden_TH
        delta_TH = layer.ffn(hidden_TH, normed_TH, chosen, self._reduce, latent_TL=latent_TL)
        if layer.ffn_result_norm is not None:
            delta_TH = layer.ffn_result_norm(delta_TH)
        if layer.mixers is None:
            hidden_TH.add_(delta_TH, alpha=self.spec.residual_multiplier)
        else:
            assert factors_TF is not None, "made by `post`"
            layer.mixers[1].add_(hidden_TH, delta_TH, factors_TF)
        return hidden_TH if layer.scalar_1 is None else hidden_TH.mul_(layer.scalar_1)

    def add_experts(
        self, i: int, inputs: tuple[Tensor, Tensor], routing: Routing, group: ExpertGroup
    ) -> None:
        """Add this rank's outputs of a group of experts of layer `i` to the sums of the tokens.

        The groups of a layer are computed in ascending order, then `ffn` with the sums.

        Args:
            inputs: Hidden state and its norm, [T, H] each; in place of the norm its latent, [T, L],
                where the experts have one.
        """
        self._experts(i).add_experts(*inputs, routing, group)

    def local_ffn(self, i: int, normed_TH: Tensor, routing: Routing | None) -> Tensor:
        """Return what this rank's FFN shard of layer `i` adds to the hidden state; [T, H]."""
        ffn = self._layers[i].ffn
        assert ffn is not None, f"layer {i} has no network"
        return ffn(normed_TH, normed_TH, routing, keep)

    def final(self, hidden_TH: Tensor, rows_R: Tensor) -> Tensor:
        """Compute the final norm of the rows that need logits, [R, H]; `rows_R` is int64."""
        merged_RH = merge(hidden_TH[rows_R], self.spec.streams, self._merge)
        return merged_RH if self._final_norm is None else self._final_norm(merged_RH)

    def logits(self, final_RH: Tensor) -> Tensor:
        """Return logits [R, V] of normed rows, in the type of the model or in float32.

        V are labels in a model with a classification head. Without a head, rows stay as they are.
        """
        if self._head is None:
            return final_RH
        out_RV = None
        if self.spec.has_float_head:
            size = (len(final_RH), self._head.out_features)
            out_RV = torch.empty(size, dtype=torch.float32, device=final_RH.device)
        logits_RV, cap = self._head(final_RH, out_RV), self.spec.logit_softcap
        if self.spec.logits_divisor != 1:
            logits_RV = logits_RV / self.spec.logits_divisor
        return logits_RV if cap is None else (logits_RV / cap).tanh_().mul_(cap)
