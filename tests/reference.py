"""The routers in plain torch: the oracle of the tests, one token after the other where it matters.

T tokens, E experts, K experts per token, G groups of experts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.model.rope import dynamic_frequencies, inverse_frequencies
from raymoe.specs.attention.grouped import AttentionSpec
from raymoe.specs.attention.kind import AttentionKind
from raymoe.specs.attention.latent import IndexerSpec, LatentAttentionSpec
from raymoe.specs.attention.recurrent import RECURRENT, RecurrentSpec
from raymoe.specs.layer_weights import (
    ATTENTION_MIXER,
    ATTENTION_RESULT_NORM,
    EMBEDDING,
    EXPERTS_INPUT_NORM,
    EXPERTS_RESULT_NORM,
    FFN_MIXER,
    FFN_NORM,
    FFN_RESULT_NORM,
    FINAL_NORM,
    HEAD,
    HEAD_BIAS,
    INPUT_NORM,
    LATENT_IN,
    LATENT_OUT,
    LAYER_SCALAR,
    MERGE,
    SHARED_RESULT_NORM,
    layer_prefix,
)
from raymoe.specs.model import DenseSpec, ModelSpec, MoeSpec
from raymoe.specs.rope import RopeSpec

SCORES = {
    "softmax": lambda logits_TE: logits_TE.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits_TE: (1 + logits_TE.double().exp()).log().sqrt().to(logits_TE),
}


def reference_routing(
    logits_TE: Tensor, moe: MoeSpec, selection_bias_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Experts and weights of each token, [T, K] each, in the type of the logits."""
    if moe.router.scoring == "sparsemixer":
        return _sparse_mixer(logits_TE, moe)
    router = moe.router
    if router.logit_softcap is not None:
        logits_TE = (logits_TE / router.logit_softcap).tanh() * router.logit_softcap
    scores_TE = SCORES[router.scoring](logits_TE)
    choice_TE = logits_TE if router.chooses_by_logits else scores_TE
    if selection_bias_E is not None:
        choice_TE = choice_TE + selection_bias_E
    if router.num_groups > 1:
        size = moe.num_experts // router.num_groups
        grouped_TGX = choice_TE.clone().view(len(choice_TE), router.num_groups, size)
        score_TG = grouped_TGX.topk(1 if router.group_score == "max" else 2).values.sum(-1)
        worst_TG = score_TG.topk(router.num_groups - router.top_groups, largest=False).indices
        for token, groups in enumerate(worst_TG.tolist()):
            grouped_TGX[token, groups] = -torch.inf
        choice_TE = grouped_TGX.flatten(1)
    ids_TK = choice_TE.topk(moe.top_k).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if router.renormalize:
        sums_T1 = weights_TK.sum(-1, keepdim=True)
        sums_T1 = sums_T1.clamp_min(router.min_weight_sum) + router.added_weight_sum
        weights_TK = weights_TK / sums_T1
    return ids_TK, weights_TK * router.scale


def _sparse_mixer(logits_TE: Tensor, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    ids_TK = logits_TE.topk(moe.top_k).indices
    weights_TK = torch.empty(ids_TK.shape, dtype=logits_TE.dtype)
    for token, ids in enumerate(ids_TK.tolist()):
        left = dict(enumerate(logits_TE[token].tolist()))
        for slot, best in enumerate(ids):
            near = [
                logit
                for logit in left.values()
                if left[best] - logit <= 2 * moe.router.jitter * max(abs(logit), left[best])
            ]
            weights_TK[token, slot] = torch.tensor(near).sub(left.pop(best)).exp().sum() ** -1
    return ids_TK, weights_TK


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
}


def _frequencies(spec: RopeSpec, lengths_T: Tensor) -> Tensor:
    """Return inverse frequencies [T, R] of tokens of sequences with these rope lengths."""
    if spec.kind == "dynamic":
        return dynamic_frequencies(spec, lengths_T)
    sets = inverse_frequencies(spec)
    is_long_T1 = (lengths_T > spec.original_max_tokens)[:, None]
    return torch.where(is_long_T1, sets[-1], sets[0])


class _Residual:
    """A hidden state of one stream [T, 1, H]."""

    def __init__(self, model: "ReferenceModel", embedded_TH: Tensor) -> None:
        self.hidden_TSH = embedded_TH[:, None]
        self._multiplier = model.spec.residual_multiplier

    def read(self, _name: str) -> Tensor:
        return self.hidden_TSH[:, 0]

    def add(self, result_TH: Tensor) -> None:
        self.hidden_TSH = self.hidden_TSH + (result_TH * self._multiplier)[:, None]

    def merged(self) -> Tensor:
        return self.hidden_TSH[:, 0]


class _Streams:
    """A hidden state of several streams [T, S, H], and the factors of the block that reads it."""

    def __init__(self, model: "ReferenceModel", embedded_TH: Tensor) -> None:
        assert model.spec.streams is not None
        self._model, self._spec = model, model.spec.streams
        self.hidden_TSH = embedded_TH[:, None].repeat(1, self._spec.count, 1)

    def merged(self) -> Tensor:
        if self._spec.merge == "mean":
            return self.hidden_TSH.mean(1)
        (logits_TS,) = self._logits(MERGE, [self._spec.count])
        weighted_TSH = (logits_TS.sigmoid() + self._spec.eps)[..., None] * self.hidden_TSH
        return weighted_TSH.sum(1).to(self._model.dtype)

    def _logits(self, name: str, sizes: list[int]) -> list[Tensor]:
        """Parts of these sizes, each with a scale of its own."""
        spec, model, wide = self._spec, self._model, self._model._wide
        wide_TX = self.hidden_TSH.to(wide).flatten(1)
        normed_TX = wide_TX * torch.rsqrt(wide_TX.square().mean(1, keepdim=True) + spec.norm_eps)
        weight_FX, base_F, scale = (
            model._weight(f"{name}.{leaf}").to(wide) for leaf in ("weight", "base", "scale")
        )
        parts = functional.linear(normed_TX, weight_FX).split(sizes, dim=1)
        return [
            part * factor + base
            for part, factor, base in zip(parts, scale, base_F.split(sizes), strict=True)
        ]

    def read(self, name: str) -> Tensor:
        spec, model = self._spec, self._model
        sizes = [spec.count, spec.count, spec.count**2][: spec.num_scales]
        pre_TS, post_TS, *matrix = self._logits(name, sizes)
        weighted_TSH = (pre_TS.sigmoid() + spec.eps)[..., None] * self.hidden_TSH
        read_TH = weighted_TSH.sum(1).to(model.dtype)
        self._post_TS1 = (spec.magnitude * post_TS.sigmoid())[..., None]
        if spec.sinkhorn_iterations is None:
            self._post_TS1 = self._post_TS1 + spec.eps
            return read_TH
        (matrix_TX,) = matrix
        self._post_TS1 = self._post_TS1.to(model.dtype)
        matrix_TSS = matrix_TX.unflatten(1, (spec.count, spec.count)).softmax(-1) + spec.eps
        for step in range(2 * spec.sinkhorn_iterations - 1):
            axis = 1 if step % 2 == 0 else 2
            matrix_TSS = matrix_TSS / (matrix_TSS.sum(axis, keepdim=True) + spec.eps)
        self._matrix_TSS = matrix_TSS.to(model.dtype)
        return read_TH

    def add(self, result_TH: Tensor) -> None:
        if self._spec.sinkhorn_iterations is None:
            sum_TSH = self._post_TS1 * result_TH[:, None] + self.hidden_TSH.to(self._model._wide)
            self.hidden_TSH = sum_TSH.to(self._model.dtype)
            return
        mixed_TSH = torch.einsum("tjk,tjh->tkh", self._matrix_TSS, self.hidden_TSH)
        self.hidden_TSH = self._post_TS1 * result_TH[:, None] + mixed_TSH


@dataclass
class _Rotation:
    cosine: Tensor
    sine: Tensor
    is_interleaved: bool
    query_factor: Tensor | float = 1.0

    def __call__(self, heads_TXD: Tensor) -> Tensor:
        num_rotated = 2 * self.cosine.shape[1]
        rotary_TXD, rest_TXD = heads_TXD[..., :num_rotated], heads_TXD[..., num_rotated:]
        if self.is_interleaved:
            first, second = rotary_TXD[..., ::2], rotary_TXD[..., 1::2]
        else:
            first, second = rotary_TXD.tensor_split(2, dim=-1)
        cos_T1R, sin_T1R = self.cosine[:, None], self.sine[:, None]
        rotated = (first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R)
        return torch.cat([*rotated, rest_TXD], dim=-1)


class ReferenceModel:
    """One sequence at a time, all of it at once, no cache."""

    def __init__(
        self, spec: ModelSpec, weights: Callable[[str], Tensor], dtype: torch.dtype
    ) -> None:
        self.spec, self.dtype = spec, dtype
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._weights = weights

    @torch.no_grad()
    def logits(self, token_ids: list[int], prompt_tokens: int | None = None) -> Tensor:
        """Logits [T, V] after each token.

        Args:
            token_ids: The sequence, prompt and generated tokens.
            prompt_tokens: Length of the prompt, which decides the rotation of length-dependent
                ropes (`model.rope`); None: all of it is prompt.
        """
        spec = self.spec
        multiplier = torch.tensor(spec.embedding_multiplier, dtype=torch.float64)
        if spec.rounds_embedding_multiplier:
            multiplier = multiplier.to(self.dtype)
        hidden_TH = self._weight(EMBEDDING)[torch.tensor(token_ids)] * float(multiplier)
        residual = (_Residual if spec.streams is None else _Streams)(self, hidden_TH)
        for i, layer in enumerate(spec.layers):
            prefix = layer_prefix(i)
            norms = layer.norms
            hidden_TH = residual.read(f"{prefix}{ATTENTION_MIXER}")
            normed_TH = self._norm(hidden_TH, f"{prefix}{INPUT_NORM}", norms.before_attention)
            rotation = self._rotation(layer.rope, len(token_ids), prompt_tokens or len(token_ids))
            attention = self._attention(
                normed_TH, layer.attention, f"{prefix}self_attn.", rotation=rotation
            )
            attention = self._norm(
                attention, f"{prefix}{ATTENTION_RESULT_NORM}", norms.after_attention
            )
            residual.add(attention)
            hidden_TH = residual.read(f"{prefix}{FFN_MIXER}")
            if not layer.is_parallel:
                normed_TH = self._norm(hidden_TH, f"{prefix}{FFN_NORM}", norms.before_ffn)
            if not layer.has_network:
                continue
            if isinstance(layer.ffn, DenseSpec):
                ffn_TH = self._dense(normed_TH, layer.ffn, f"{prefix}mlp.")
            else:
                ffn_TH = self._moe(hidden_TH, normed_TH, layer.ffn, prefix)
            ffn_TH = self._norm(ffn_TH, f"{prefix}{FFN_RESULT_NORM}", norms.after_ffn)
            residual.add(ffn_TH)
            if layer.has_scalar:
                residual.hidden_TSH *= self._weight(f"{prefix}{LAYER_SCALAR}")
        normed_TH = self._norm(residual.merged(), FINAL_NORM.removesuffix(".weight"))
        head = EMBEDDING if spec.tie_word_embeddings else HEAD
        bias_V = self._weight(HEAD_BIAS) if spec.has_head_bias else None
        logits_TV = functional.linear(normed_TH, self._weight(head), bias_V) / spec.logits_divisor
        cap = spec.logit_softcap
        return logits_TV if cap is None else (logits_TV / cap).tanh() * cap

    def generate(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Greedy tokens."""
        tokens = list(prompt)
        for _ in range(max_new_tokens):
            tokens.append(int(self.logits(tokens, len(prompt))[-1].argmax()))
        return tokens[len(prompt) :]

    def _weight(self, name: str) -> Tensor:
        return self._weights(name).to(self.dtype)

    def _linear(self, input_TI: Tensor, name: str, *, has_bias: bool = False) -> Tensor:
        bias_O = self._weight(f"{name}.bias") if has_bias else None
        return functional.linear(input_TI, self._weight(f"{name}.weight"), bias_O)

    def _norm(self, input_TH: Tensor, name: str, exists: bool = True) -> Tensor:
        if not exists:
            return input_TH
        if self.spec.norm != "layer":
            return self._rms_norm(input_TH, f"{name}.weight")
        wide_TH = input_TH.to(self._wide)
        centred_TH = wide_TH - wide_TH.mean(-1, keepdim=True)
        variance_T1 = centred_TH.pow(2).mean(-1, keepdim=True)
        normed_TH = centred_TH * torch.rsqrt(variance_T1 + self.spec.norm_eps)
        normed_TH = normed_TH * self._weight(f"{name}.weight").to(self._wide)
        if self.spec.has_norm_bias:
            normed_TH = normed_TH + self._weight(f"{name}.bias").to(self._wide)
        return normed_TH.to(self.dtype)

    def _rms_norm(self, input_TX: Tensor, name: str | None, eps: float | None = None) -> Tensor:
        wide_TX = input_TX.to(self._wide)
        mean_T1 = wide_TX.pow(2).mean(-1, keepdim=True)
        offset = self.spec.norm_offset if eps is None else None
        eps = self.spec.norm_eps if eps is None else eps
        normed_TX = wide_TX * torch.rsqrt(mean_T1 + eps)
        if name is None:
            return normed_TX.to(self.dtype)
        if offset is not None:
            weight_X = offset + self._weight(name).to(self._wide)
            return (normed_TX * weight_X).to(self.dtype)
        return self._weight(name) * normed_TX.to(self.dtype)

    def _rotation(self, rope: RopeSpec | None, num_tokens: int, prompt_tokens: int) -> "_Rotation":
        if rope is None:
            nothing = torch.empty(num_tokens, 0, dtype=self.dtype)
            return _Rotation(nothing, nothing, is_interleaved=False)
        positions_T = torch.arange(num_tokens)
        lengths_T = (positions_T + 1).clamp_min(prompt_tokens)
        inv_TR = _frequencies(rope, lengths_T).to(self._wide)
        angles_TR = positions_T.to(self._wide)[:, None] * inv_TR
        tables = (angles_TR.cos(), angles_TR.sin())
        return _Rotation(
            *((table * rope.attention_factor).to(self.dtype) for table in tables),
            is_interleaved=rope.is_interleaved,
            query_factor=self._query_factor(rope, positions_T),
        )

    def _query_factor(self, rope: RopeSpec, positions_T: Tensor) -> Tensor | float:
        if not rope.query_beta:
            return 1.0
        periods_T = (positions_T // rope.query_period).to(self._wide)
        return (1 + rope.query_beta * periods_T.log1p())[:, None, None].to(self.dtype)

    def _attention(
        self,
        normed_TH: Tensor,
        spec: AttentionKind,
        prefix: str,
        *,
        rotation: "_Rotation",
    ) -> Tensor:
        if isinstance(spec, LatentAttentionSpec):
            return self._latent_attention(normed_TH, spec, prefix, rotation=rotation)
        if isinstance(spec, RecurrentSpec):
            return self._recurrent(normed_TH, spec, prefix.replace("self_attn.", RECURRENT))
        query_TAD, key_TGD, value_TGV = self._heads(normed_TH, spec, prefix)
        query_TAD, key_TGD = rotation(query_TAD) * rotation.query_factor, rotation(key_TGD)
        if spec.temperature is not None:
            numbers_T = torch.arange(1, len(query_TAD) + 1)
            periods_T = (numbers_T // spec.temperature.period).to(self._wide)
            factors_T = 1 + spec.temperature.beta * periods_T.log1p()
            query_TAD = (query_TAD * factors_T[:, None, None]).to(self.dtype)
        if spec.qk_norm == "unit":
            query_TAD, key_TGD = self._rms_norm(query_TAD, None), self._rms_norm(key_TGD, None)
        elif spec.qk_norm != "none" and spec.is_norm_after_rope:
            query_TAD = self._rms_norm(query_TAD, f"{prefix}q_norm.weight")
            key_TGD = self._rms_norm(key_TGD, f"{prefix}k_norm.weight")
        group = spec.num_heads // spec.num_kv_heads
        key_TAD = key_TGD.repeat_interleave(group, 1)
        value_TAV = value_TGV.repeat_interleave(group, 1) * spec.value_scale
        scores_ATT = torch.einsum("tad,sad->ats", query_TAD, key_TAD) * spec.scale
        sinks_A = self._weight(f"{prefix}sinks") if spec.has_sinks else None
        if spec.chunk_tokens is not None:
            chunk_T = torch.arange(len(query_TAD)) // spec.chunk_tokens
            scores_ATT = scores_ATT.masked_fill(chunk_T[:, None] != chunk_T, float("-inf"))
        weights_ATT = self._softmax(scores_ATT, spec.sliding_window, sinks_A)
        mixed_TAV = torch.einsum("ats,sav->tav", weights_ATT, value_TAV)
        mixed_TAV = self._gated(mixed_TAV, normed_TH, spec, prefix)
        return self._linear(mixed_TAV.flatten(1), f"{prefix}o_proj", has_bias=spec.output_bias)

    def _latent_attention(
        self,
        normed_TH: Tensor,
        spec: LatentAttentionSpec,
        prefix: str,
        *,
        rotation: "_Rotation",
    ) -> Tensor:
        """In plain form: keys and values of all heads from the latents of the tokens."""
        query_TX, name = normed_TH, f"{prefix}q_proj"
        if spec.q_lora_rank is not None:
            query_TX = self._linear(normed_TH, f"{prefix}q_a_proj", has_bias=spec.has_bias)
            query_TX = self._rms_norm(query_TX, f"{prefix}q_a_layernorm.weight", spec.norm_eps)
            name = f"{prefix}q_b_proj"
        query_TAD = self._linear(query_TX, name).view(-1, spec.num_heads, spec.query_head_dim)
        row_TX = self._linear(normed_TH, f"{prefix}kv_a_proj_with_mqa", has_bias=spec.has_bias)
        latent_TX, rope_TX = row_TX.tensor_split([spec.kv_lora_rank], dim=-1)
        latent_TX = self._rms_norm(latent_TX, f"{prefix}kv_a_layernorm.weight", spec.norm_eps)
        up_projected_TX = self._linear(latent_TX, f"{prefix}kv_b_proj")
        up_projected_TAX = up_projected_TX.view(
            -1, spec.num_heads, spec.nope_head_dim + spec.value_head_dim
        )
        key_TAD, value_TAD = up_projected_TAX.tensor_split([spec.nope_head_dim], dim=-1)
        nope_TAD, rope_TAD = query_TAD.tensor_split([spec.nope_head_dim], dim=-1)
        scores_ATT = torch.einsum("tad,sad->ats", nope_TAD * rotation.query_factor, key_TAD)
        rope_TAD = rotation(rope_TAD) * rotation.query_factor
        rope_T1D = rotation(rope_TX[:, None])
        scores_ATT = scores_ATT + torch.einsum("tad,sd->ats", rope_TAD, rope_T1D[:, 0])
        scores_ATT = scores_ATT * spec.scale
        if spec.indexer is not None:
            if not spec.indexer.is_shared:
                self._chosen_TT = self._choice(normed_TH, query_TX, spec.indexer, prefix, rotation)
            scores_ATT = scores_ATT.masked_fill(~self._chosen_TT, float("-inf"))
        sinks_A = self._weight(f"{prefix}sinks") if spec.has_sinks else None
        weights_ATT = self._softmax(scores_ATT, sinks_A=sinks_A)
        mixed_TAD = torch.einsum("ats,sad->tad", weights_ATT, value_TAD)
        mixed_TAD = self._gated(mixed_TAD, normed_TH, spec, prefix)
        return self._linear(mixed_TAD.flatten(1), f"{prefix}o_proj", has_bias=spec.has_bias)

    def _gated(
        self,
        mixed_TAV: Tensor,
        normed_TH: Tensor,
        spec: AttentionSpec | LatentAttentionSpec,
        prefix: str,
    ) -> Tensor:
        if spec.gate is None:
            return mixed_TAV
        gate_TX = self._linear(normed_TH, f"{prefix}g_proj", has_bias=spec.gate.has_bias)
        factor_TX = GATES[spec.gate.activation](gate_TX)
        return mixed_TAV * factor_TX.unflatten(1, (spec.num_heads, -1))

    def _choice(
        self,
        normed_TH: Tensor,
        latent_TL: Tensor,
        spec: IndexerSpec,
        prefix: str,
        rotation: "_Rotation",
    ) -> Tensor:
        """Which positions each token may attend to, apart from those that follow it."""
        num_tokens, name = len(normed_TH), f"{prefix}indexer."
        norm = [self._weight(f"{name}k_norm.{part}") for part in ("weight", "bias")]
        key_TI = self._linear(normed_TH, f"{name}wk")
        key_TI = functional.layer_norm(key_TI, (spec.head_dim,), *norm, spec.key_norm_eps)
        query_TX = self._linear(latent_TL, f"{name}wq_b")
        rotation = replace(rotation, is_interleaved=spec.is_interleaved)
        heads = [key_TI[:, None], query_TX.view(num_tokens, spec.num_heads, -1)]
        if spec.rotates_end:
            border = spec.head_dim - 2 * rotation.cosine.shape[1]
            heads = [torch.cat([each[..., border:], each[..., :border]], -1) for each in heads]
        key_T1I, query_TJI = map(rotation, heads)
        key_EI, size = key_T1I[:, 0], spec.entry_tokens
        if spec.pool is not None:
            share_EPI = self._linear(normed_TH, f"{name}pool_gate").to(self._wide)
            share_EPI = share_EPI[: num_tokens // size * size].unflatten(0, (-1, size))
            share_EPI = (share_EPI + self._weight(f"{name}pool_bias").to(self._wide)).softmax(1)
            key_EPI = key_EI[: num_tokens // size * size].unflatten(0, (-1, size))
            key_EI = (share_EPI * key_EPI).sum(1).to(self.dtype)
        products_TJE = torch.einsum("tji,ei->tje", query_TJI, key_EI).clamp_min(0)
        weight_TJ = self._linear(normed_TH, f"{name}weights_proj")
        scores_TE = torch.einsum("tj,tje->te", weight_TJ, products_TJE)
        chosen_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool)
        for position in range(spec.num_seen, num_tokens):
            num_whole = (position + 1) // size
            best_K = scores_TE[position, :num_whole].topk(spec.top_k // size).indices
            chosen_TT[position, : num_whole * size] = False
            for entry in best_K.tolist():
                chosen_TT[position, entry * size : (entry + 1) * size] = True
        return chosen_TT

    def _recurrent(self, normed_TH: Tensor, spec: RecurrentSpec, prefix: str) -> Tensor:
        """Token by token; in float32 at least, as every implementation."""
        if spec.kind == "mamba2":
            return self._mamba(normed_TH, spec, prefix)
        if spec.kind == "short_conv":
            return self._short_conv(normed_TH, spec, prefix)
        query_TX, key_TX, value_TX = (
            self._convolved(
                self._linear(normed_TH, f"{prefix}{part}_proj"), f"{prefix}{part}_conv"
            ).to(self._wide)
            for part in "qkv"
        )
        repeats = spec.num_heads // spec.num_key_heads
        query_THK, key_THK = (
            (
                each_TGK * torch.rsqrt(each_TGK.square().sum(2, keepdim=True) + 1e-6)
            ).repeat_interleave(repeats, 1)
            for each_TGK in (
                each_TX.view(len(each_TX), spec.num_key_heads, -1) for each_TX in (query_TX, key_TX)
            )
        )
        value_THV = value_TX.view(len(value_TX), spec.num_heads, -1)
        parts = "a" if spec.latent_width is None else ("f_a", "f_b")
        decay_TA = self._in_turn(normed_TH, prefix, parts).to(self._wide)
        decay_TA = decay_TA + self._weight(f"{prefix}dt_bias")
        rate_H1 = self._weight(f"{prefix}A_log").to(self._wide).exp()[:, None]
        decay_THX = decay_TA.unflatten(1, (spec.num_heads, -1))
        if spec.decay_bound is None:
            decay_THX = (-rate_H1 * functional.softplus(decay_THX)).exp()
        else:
            decay_THX = (spec.decay_bound * (rate_H1 * decay_THX).sigmoid()).exp()
        gain_TH = self._linear(normed_TH, f"{prefix}b_proj").to(self._wide).sigmoid()
        state_HKV = value_THV.new_zeros(spec.num_heads, spec.key_dim, spec.value_dim)
        read = []
        for t in range(len(normed_TH)):
            state_HKV = state_HKV * decay_THX[t, :, :, None]
            known_HV = torch.einsum("hkv,hk->hv", state_HKV, key_THK[t])
            written_HV = gain_TH[t, :, None] * (value_THV[t] - known_HV)
            state_HKV = state_HKV + key_THK[t, :, :, None] * written_HV[:, None]
            read.append(torch.einsum("hkv,hk->hv", state_HKV, query_THK[t]) * spec.key_dim**-0.5)
        parts = "g" if spec.latent_width is None else ("g_a", "g_b")
        gate_TX = self._in_turn(normed_TH, prefix, parts)
        gate_TX = gate_TX.sigmoid() if spec.kind == "kimi_delta" else functional.silu(gate_TX)
        normed_THV = self._rms_norm(
            torch.stack(read).to(self.dtype), f"{prefix}norm.weight", spec.norm_eps
        )
        return self._linear(normed_THV.flatten(1) * gate_TX, f"{prefix}o_proj")

    def _in_turn(self, input_TI: Tensor, prefix: str, parts: Iterable[str]) -> Tensor:
        for part in parts:
            input_TI = self._linear(input_TI, f"{prefix}{part}_proj")
        return input_TI

    def _short_conv(self, normed_TH: Tensor, spec: RecurrentSpec, prefix: str) -> Tensor:
        gain_TH, gate_TH, value_TH = (
            self._linear(normed_TH, f"{prefix}{part}_proj", has_bias=spec.has_bias)
            for part in "bgv"
        )
        weight_HW = self._weight(f"{prefix}v_conv.weight")[:, 0]
        bias_H = self._weight(f"{prefix}v_conv.bias") if spec.has_conv_bias else 0
        product_TH = gain_TH * value_TH
        mixed = []
        for t in range(len(product_TH)):
            past_HX = product_TH[max(0, t + 1 - spec.conv_width) : t + 1].T
            mixed.append((past_HX * weight_HW[:, -past_HX.shape[1] :]).sum(1) + bias_H)
        gated_TH = gate_TH * torch.stack(mixed)
        return self._linear(gated_TH, f"{prefix}o_proj", has_bias=spec.has_bias)

    def _mamba(self, normed_TH: Tensor, spec: RecurrentSpec, prefix: str) -> Tensor:
        gate_TX, value_TX, key_TX, query_TX, step_TH = (
            self._linear(normed_TH, f"{prefix}{part}_proj", has_bias=spec.has_bias)
            for part in "gvkqa"
        )
        value_TX, key_TX, query_TX = (
            self._convolved(each_TX, f"{prefix}{part}_conv", has_bias=spec.has_conv_bias)
            for each_TX, part in ((value_TX, "v"), (key_TX, "k"), (query_TX, "q"))
        )
        repeats = spec.num_heads // spec.num_key_heads
        key_THK, query_THK = (
            each_TX.unflatten(1, (spec.num_key_heads, -1)).repeat_interleave(repeats, 1)
            for each_TX in (key_TX, query_TX)
        )
        value_THV = value_TX.unflatten(1, (spec.num_heads, -1))
        step_TH = functional.softplus(step_TH + self._weight(f"{prefix}dt_bias"))
        decay_TH = (-self._weight(f"{prefix}A_log").exp() * step_TH).exp()
        state_HVK = value_THV.new_zeros(spec.num_heads, spec.value_dim, spec.key_dim)
        read = []
        for t in range(len(normed_TH)):
            written_HVK = (step_TH[t, :, None] * value_THV[t])[..., None] * key_THK[t, :, None]
            state_HVK = state_HVK * decay_TH[t, :, None, None] + written_HVK
            read.append((state_HVK @ query_THK[t, :, :, None])[..., 0])
        read_THV = torch.stack(read) + self._weight(f"{prefix}D")[:, None] * value_THV
        gated_TX = read_THV.flatten(1).to(self._wide) * functional.silu(gate_TX.to(self._wide))
        gated_TGX = gated_TX.unflatten(1, (spec.num_key_heads, -1))
        mean_TG1 = gated_TGX.square().mean(2, keepdim=True)
        normed_TX = (gated_TGX / (mean_TG1 + spec.norm_eps).sqrt()).flatten(1).to(self.dtype)
        normed_TX = normed_TX * self._weight(f"{prefix}norm.weight")
        return self._linear(normed_TX, f"{prefix}o_proj", has_bias=spec.has_bias)

    def _convolved(self, input_TC: Tensor, name: str, *, has_bias: bool = False) -> Tensor:
        weight_C1W = self._weight(f"{name}.weight")
        bias_C = self._weight(f"{name}.bias") if has_bias else None
        padded_CX = functional.pad(input_TC.T, (weight_C1W.shape[2] - 1, 0))
        mixed_CT = functional.conv1d(padded_CX, weight_C1W, bias_C, groups=len(weight_C1W))
        return functional.silu(mixed_CT).T

    def _softmax(
        self,
        scores_ATT: Tensor,
        sliding_window: int | None = None,
        sinks_A: Tensor | None = None,
    ) -> Tensor:
        """Weights of what each token sees; a sink takes its part and is gone."""
        num_tokens = scores_ATT.shape[1]
        position_T = torch.arange(num_tokens)
        distance_TT = position_T[:, None] - position_T
        is_visible_TT = distance_TT >= 0
        if sliding_window is not None:
            is_visible_TT &= distance_TT < sliding_window
        scores_ATT = scores_ATT.masked_fill(~is_visible_TT, float("-inf"))
        if sinks_A is not None:
            sinks_AT1 = sinks_A[:, None, None].expand(-1, num_tokens, 1)
            scores_ATT = torch.cat([scores_ATT, sinks_AT1], dim=-1)
        return scores_ATT.to(self._wide).softmax(-1).to(self.dtype)[..., :num_tokens]

    def _heads(
        self, normed_TH: Tensor, spec: AttentionSpec, prefix: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = []
        for part, count in (
            ("q", spec.num_heads),
            ("k", spec.num_kv_heads),
            ("v", spec.num_kv_heads),
        ):
            source = "k" if part == "v" and spec.values_are_keys else part
            width_TX = self._linear(normed_TH, f"{prefix}{source}_proj", has_bias=spec.qkv_bias)
            norm = "none" if part == "v" or spec.is_norm_after_rope else spec.qk_norm
            if norm == "full":
                width_TX = self._rms_norm(width_TX, f"{prefix}{part}_norm.weight")
            heads_TXD = width_TX.view(len(width_TX), count, -1)
            if norm == "head":
                heads_TXD = self._rms_norm(heads_TXD, f"{prefix}{part}_norm.weight")
            if norm == "layer":
                heads_TXD = self._norm(heads_TXD, f"{prefix}{part}_norm")
            if part == "v" and spec.norms_values:
                heads_TXD = self._rms_norm(heads_TXD, None)
            if spec.clip_qkv is not None:
                heads_TXD = heads_TXD.clamp(-spec.clip_qkv, spec.clip_qkv)
            heads.append(heads_TXD)
        return heads[0], heads[1], heads[2]

    def _dense(self, input_TH: Tensor, spec: DenseSpec, prefix: str) -> Tensor:
        clamp = spec.clamp
        if spec.activation == "relu2":
            wide_TF = ACTIVATIONS["relu2"](self._linear(input_TH, f"{prefix}up_proj"))
            return self._linear(wide_TF, f"{prefix}down_proj")
        gate, up, down = (f"{prefix}{part}_proj" for part in ("gate", "up", "down"))
        gate_TF = self._linear(input_TH, gate, has_bias=spec.has_bias)
        up_TF = self._linear(input_TH, up, has_bias=spec.has_bias)
        if clamp is None:
            product_TF = ACTIVATIONS[spec.activation](gate_TF) * up_TF
        else:
            cut_TF = gate_TF.clamp_max(clamp.gate_limit)
            up_TF = up_TF.clamp(-clamp.limit, clamp.limit)
            product_TF = (up_TF + clamp.offset) * cut_TF * (clamp.gain * cut_TF).sigmoid()
        return self._linear(product_TF, down, has_bias=spec.has_bias)

    def _moe(self, hidden_TH: Tensor, normed_TH: Tensor, spec: MoeSpec, layer: str) -> Tensor:
        prefix, input_TH, router_TH = f"{layer}mlp.", normed_TH, normed_TH
        if spec.has_branch_norms:
            input_TH = self._norm(hidden_TH, f"{layer}{EXPERTS_INPUT_NORM}")
        if spec.latent_size is not None:
            input_TH = self._linear(normed_TH, f"{layer}{LATENT_IN}")
        if spec.router.has_input_norm:
            name = f"{prefix}gate.input_norm.weight"
            router_TH = self._rms_norm(hidden_TH, name, self.spec.norm_eps)
            router_TH = router_TH * hidden_TH.shape[1] ** -0.5
        out_TH = self._experts(input_TH, router_TH, spec, prefix)
        if spec.latent_size is not None:
            out_TH = self._linear(out_TH, f"{layer}{LATENT_OUT}")
        if spec.has_branch_norms:
            out_TH = self._norm(out_TH, f"{layer}{EXPERTS_RESULT_NORM}")
        if spec.shared is None:
            return out_TH
        network = spec.shared.network(spec.activation)
        shared_TH = self._dense(normed_TH, network, f"{prefix}shared_expert.")
        if spec.has_branch_norms:
            shared_TH = self._norm(shared_TH, f"{layer}{SHARED_RESULT_NORM}")
        if spec.shared.is_gated:
            gate_T1 = self._linear(normed_TH, f"{prefix}shared_expert_gate").sigmoid()
            shared_TH = gate_T1 * shared_TH
        return out_TH + spec.shared.scale * shared_TH

    def _experts(self, input_TH: Tensor, router_TH: Tensor, spec: MoeSpec, prefix: str) -> Tensor:
        logits_TE = self._linear(router_TH, f"{prefix}gate", has_bias=spec.router.has_bias)
        selection_E = None
        if spec.router.has_selection_bias:
            selection_E = self._weight(f"{prefix}gate.e_score_correction_bias").to(self._wide)
        ids_TK, weights_TK = reference_routing(logits_TE.to(self._wide), spec, selection_E)
        if spec.router.has_expert_scales:
            weights_TK = weights_TK * self._weight(f"{prefix}gate.expert_scales")[ids_TK]
        if spec.router.scales_input:
            input_TH = input_TH * weights_TK.to(self.dtype)
            weights_TK = torch.ones_like(weights_TK)
        out_TH = torch.zeros_like(input_TH)
        expert_spec = DenseSpec(
            hidden=spec.expert_hidden,
            activation=spec.activation,
            has_bias=spec.has_bias,
            clamp=spec.clamp,
        )
        for expert in range(spec.num_experts):
            tokens, slots = (ids_TK == expert).nonzero(as_tuple=True)
            if len(tokens):
                name = f"{prefix}experts.{expert}."
                expert_RH = self._dense(input_TH[tokens], expert_spec, name)
                expert_RH = expert_RH * weights_TK[tokens, slots, None].to(self.dtype)
                out_TH.index_add_(0, tokens, expert_RH)
        return out_TH
