"""Layers that keep a state per sequence in place of attention (linear attention).

T tokens, C channels of the convolution, H heads, V dimensions of a value.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_elementwise import Projected, rms_norm, weigh_norm
from raymoe.kernels.cpu_state import causal_conv, scan
from raymoe.kernels.paged_kv import StateLayout
from raymoe.model.attention import OneForm
from raymoe.model.loading import Loader
from raymoe.model.rope import Angles
from raymoe.specs.layers import RecurrentKind, RecurrentSpec


class Recurrent(OneForm):
    """One such layer.

    The host computes the convolution and updates the states. In `Projected`, queries are the inputs
    of the convolution, keys those of the decay, and values those of the gain.
    """

    def __init__(self, spec: RecurrentSpec, loader: Loader, prefix: str) -> None:
        """Load the weights `prefix` + "q_proj" and so on."""
        self._spec, self._dtype = spec, loader.dtype
        inputs = [f"{prefix}{part}_proj" for part in spec.inputs]
        self._input = loader.linear(inputs, has_bias=spec.has_bias)
        self._gate = loader.linear([f"{prefix}g_proj"], has_bias=spec.has_bias)
        self._output = loader.linear([f"{prefix}o_proj"], has_bias=spec.has_bias)

        def on_host(name: str) -> Tensor:
            return loader.score_vector(f"{prefix}{name}", is_on_host=True)

        convs = [f"{part}_conv" for part in spec.projections]
        conv_CW = torch.cat([on_host(f"{conv}.weight")[:, 0] for conv in convs])
        self._conv_CW = conv_CW.T.contiguous().T  # as the kernel reads it
        self._conv_bias_C = None
        if spec.has_conv_bias:
            self._conv_bias_C = torch.cat([on_host(f"{conv}.bias") for conv in convs])
        if spec.has_matrices:
            self._decay_H, self._decay_bias_A = -on_host("A_log").exp(), on_host("dt_bias")
            self._norm_X = loader.vector(f"{prefix}norm.weight")

    def project(self, normed_TH: Tensor, angles: Angles, out: Projected | None = None) -> Projected:
        del angles
        spec = self._spec
        sizes = [spec.conv_channels, spec.decay_width, spec.gain_width]
        parts = torch.split(self._input(normed_TH)[:, None], sizes, dim=2)
        if not spec.has_matrices:
            parts = (parts[0] * parts[2], parts[1], parts[2][..., :0])
        if out is None:
            return Projected(*parts)
        for target, part in zip(out, parts, strict=True):
            target.copy_(part)
        return out

    def attend(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        spec = self._spec
        past_NPC, states_NHKV = state_layout(spec, self._dtype).views(cache)
        mixed_TC = causal_conv(
            projected.query_THD[:, 0],
            self._conv_CW,
            self._conv_bias_C,
            past_NPC,
            batch,
            activation="silu" if spec.has_matrices else "none",
        )
        if not spec.has_matrices:
            return mixed_TC
        return self._scan(mixed_TC, projected, states_NHKV, batch).flatten(1)

    def _scan(
        self, mixed_TC: Tensor, projected: Projected, states_NHKV: Tensor, batch: AttentionBatch
    ) -> Tensor:
        decay_TA = functional.softplus(projected.key_TGD[:, 0].float() + self._decay_bias_A)
        return scan(
            *self._heads(mixed_TC),
            decay_TA * self._decay_H,
            projected.value_TGV[:, 0].float().sigmoid(),
            states_NHKV,
            batch,
            scale=self._spec.key_dim**-0.5,
            delta=True,
            normalize=True,
        )

    def _heads(self, mixed_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self._spec
        query_TX, key_TX, value_TX = torch.split(mixed_TC, list(spec.projections.values()), dim=1)
        return (
            query_TX.view(-1, spec.num_key_heads, spec.key_dim),
            key_TX.view(-1, spec.num_key_heads, spec.key_dim),
            value_TX.view(-1, spec.num_heads, spec.value_dim),
        )

    def output(self, attention_TX: Tensor, normed_TH: Tensor) -> Tensor:
        spec, read_TX = self._spec, attention_TX
        if spec.has_matrices:
            read_XV = attention_TX.view(-1, spec.value_dim)
            read_TX = rms_norm(read_XV, self._norm_X, spec.norm_eps).view_as(attention_TX)
        gate_TX = _GATES[spec.kind](self._gate(normed_TH).float())
        return self._output((read_TX * gate_TX).to(attention_TX.dtype))


# Factors of the output, from the outputs of a projection.
_GATES: Mapping[RecurrentKind, Callable[[Tensor], Tensor]] = {
    "gated_delta": functional.silu,
    "kimi_delta": torch.sigmoid,
    "short_conv": lambda gate_TX: gate_TX,
}


class Mamba2(Recurrent):
    """A layer in which a token's step of time is its gain, and multiplies its decay."""

    def __init__(self, spec: RecurrentSpec, loader: Loader, prefix: str) -> None:
        super().__init__(spec, loader, prefix)
        self._group_width = spec.output_width // spec.num_key_heads
        self._skip_H1 = loader.score_vector(f"{prefix}D", is_on_host=True)[:, None]

    def _scan(
        self, mixed_TC: Tensor, projected: Projected, states_NHKV: Tensor, batch: AttentionBatch
    ) -> Tensor:
        query_TGK, key_TGK, value_THV = self._heads(mixed_TC)
        step_TH = functional.softplus(projected.key_TGD[:, 0].float() + self._decay_bias_A)
        read_THV = scan(
            query_TGK,
            key_TGK,
            value_THV,
            step_TH * self._decay_H,
            step_TH,
            states_NHKV,
            batch,
            scale=1.0,
            delta=False,
            normalize=False,
        )
        skipped_THV = torch.addcmul(read_THV.float(), value_THV.float(), self._skip_H1)
        return skipped_THV.to(read_THV.dtype)

    def output(self, attention_TX: Tensor, normed_TH: Tensor) -> Tensor:
        gate_TX = functional.silu(self._gate(normed_TH).float())
        gated_TX = attention_TX * gate_TX
        gated_TGX = gated_TX.view(len(gated_TX), self._spec.num_key_heads, self._group_width)
        mean_TG1 = gated_TGX.square().mean(-1, keepdim=True)
        normed_TX = (gated_TGX * torch.rsqrt(mean_TG1 + self._spec.norm_eps)).flatten(1)
        return self._output(weigh_norm(normed_TX, self._norm_X, None, attention_TX.dtype))


def load_recurrent(spec: RecurrentSpec, loader: Loader, prefix: str) -> Recurrent:
    return (Mamba2 if spec.kind == "mamba2" else Recurrent)(spec, loader, prefix)


def state_layout(spec: RecurrentSpec, dtype: torch.dtype) -> StateLayout:
    return StateLayout(
        past=(spec.conv_width - 1, spec.conv_channels),
        heads=(spec.num_heads, spec.key_dim, spec.value_dim),
        past_dtype=dtype,
    )
