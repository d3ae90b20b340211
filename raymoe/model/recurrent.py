"""Layers that keep a state per sequence in place of attention (linear attention).

T tokens, C channels of the convolution, H heads, V dimensions of a value, A inputs of the decay.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.elementwise import Projected
from raymoe.kernels.gates import gate_and_norm, norm_and_gate
from raymoe.kernels.gpu_state.scan import StateBatch
from raymoe.kernels.paged_kv import StateLayout
from raymoe.kernels.state import causal_conv, scan
from raymoe.model.attention import OneForm
from raymoe.model.loading import Loader
from raymoe.model.rope import Angles
from raymoe.specs.attention.recurrent import RecurrentSpec


class _Constants(NamedTuple):
    """What the convolution and the scan read, in float32 where the states are.

    Attributes:
        conv_CW: The transpose of a contiguous [W, C], as the kernels read it.
        decay_H: Negative factors of the decay; empty without matrices, as its bias.
        skip_H1: Factors of values that are added to what is read; empty except in Mamba-2.
    """

    conv_CW: Tensor
    conv_bias_C: Tensor | None
    decay_H: Tensor
    decay_bias_A: Tensor
    skip_H1: Tensor

    @classmethod
    def of(cls, spec: RecurrentSpec, loader: Loader, prefix: str, *, is_on_host: bool) -> Self:
        def vector(name: str) -> Tensor:
            return loader.score_vector(f"{prefix}{name}", is_on_host=is_on_host)

        convs = [f"{part}_conv" for part in spec.projections]
        conv_CW = torch.cat([vector(f"{conv}.weight")[:, 0] for conv in convs])
        nothing = conv_CW.new_empty(0)
        return cls(
            conv_CW.T.contiguous().T,
            torch.cat([vector(f"{conv}.bias") for conv in convs]) if spec.has_conv_bias else None,
            -vector("A_log").exp() if spec.has_matrices else nothing,
            vector("dt_bias") if spec.has_matrices else nothing,
            vector("D")[:, None] if spec.kind == "mamba2" else nothing,
        )


class Stateful(OneForm, ABC):
    """A layer whose states are updated where they are: on the host or on the device."""

    has_channel_decays = False  # whether each dimension of a key decays by itself

    def attend(self, projected: Projected, cache: Tensor, batch: AttentionBatch) -> Tensor:
        return self._update(projected, cache, batch)

    def staged_batch(self, batch: AttentionBatch, device: torch.device) -> StateBatch:
        """Prepare a batch for `attend_staged` on `device`, once for all; on the host."""
        return StateBatch.of(batch, device, has_channel_decays=self.has_channel_decays)

    def attend_staged(
        self, projected: Projected, cache: Tensor, batch: StateBatch, out: Tensor | None = None
    ) -> Tensor:
        """Update states on the device of the weights, and read them; [T, X], in `out`."""
        result_TX = self._update(projected, cache, batch)
        return result_TX if out is None else out.copy_(result_TX)

    @abstractmethod
    def project(self, normed_TH: Tensor, angles: Angles, out: Projected | None = None) -> Projected:
        """As in `LayerAttention`."""

    @abstractmethod
    def output(self, attention_TX: Tensor, normed_TH: Tensor) -> Tensor:
        """As in `LayerAttention`."""

    @abstractmethod
    def _update(
        self, projected: Projected, cache: Tensor, batch: AttentionBatch | StateBatch
    ) -> Tensor:
        """Update states and return what is read, [T, X]."""


class Recurrent(Stateful):
    """Linear attention: a convolution, and mostly matrices that a token updates.

    In `Projected`, queries are the inputs of the convolution, keys those of the decay, and values
    those of the gain.
    """

    def __init__(self, spec: RecurrentSpec, loader: Loader, prefix: str) -> None:
        """Load the weights `prefix` + "q_proj" and so on."""
        self._spec, self._dtype = spec, loader.dtype
        self.has_channel_decays = spec.kind == "kimi_delta"
        inputs = [f"{prefix}{part}_proj" for part in spec.inputs]
        self._input = loader.linear(inputs, has_bias=spec.has_bias)
        self._decay = None
        if spec.latent_width is None:
            self._gates = [loader.linear([f"{prefix}g_proj"], has_bias=spec.has_bias)]
        else:
            self._decay = loader.linear([f"{prefix}f_b_proj"])  # from its latent
            self._gates = [loader.linear([f"{prefix}g_{step}_proj"]) for step in "ab"]
        self._output = loader.linear([f"{prefix}o_proj"], has_bias=spec.has_bias)
        self._on_host = _Constants.of(spec, loader, prefix, is_on_host=True)
        self._on_device = _Constants.of(spec, loader, prefix, is_on_host=False)
        if spec.has_matrices:
            self._norm_X = loader.vector(f"{prefix}norm.weight")

    def project(self, normed_TH: Tensor, angles: Angles, out: Projected | None = None) -> Projected:
        del angles
        spec = self._spec
        sizes = [spec.conv_channels, spec.latent_width or spec.decay_width, spec.gain_width]
        parts = torch.split(self._input(normed_TH)[:, None], sizes, dim=2)
        if not spec.has_matrices:
            parts = (parts[0] * parts[2], parts[1], parts[2][..., :0])
        if self._decay is not None:
            parts = (parts[0], self._decay(parts[1][:, 0])[:, None], parts[2])
        if out is None:
            return Projected(*parts)
        for target, part in zip(out, parts, strict=True):
            target.copy_(part)
        return out

    def _constants(self, batch: AttentionBatch | StateBatch) -> _Constants:
        return self._on_device if isinstance(batch, StateBatch) else self._on_host

    def _update(
        self, projected: Projected, cache: Tensor, batch: AttentionBatch | StateBatch
    ) -> Tensor:
        spec, constants = self._spec, self._constants(batch)
        past_NPC, states_NHKV = state_layout(spec, self._dtype).views(cache)
        mixed_TC = causal_conv(
            projected.query_THD[:, 0],
            constants.conv_CW,
            constants.conv_bias_C,
            past_NPC,
            batch,
            activation="silu" if spec.has_matrices else "none",
        )
        if not spec.has_matrices:
            return mixed_TC
        return self._scan(mixed_TC, projected, states_NHKV, batch).flatten(1)

    def _scan(
        self,
        mixed_TC: Tensor,
        projected: Projected,
        states_NHKV: Tensor,
        batch: AttentionBatch | StateBatch,
    ) -> Tensor:
        spec, constants = self._spec, self._constants(batch)
        decay_TA = projected.key_TGD[:, 0] + constants.decay_bias_A
        size = (len(decay_TA), spec.num_heads, spec.decay_width // spec.num_heads)
        decay_THX = log_decays(decay_TA.view(size), spec, constants.decay_H)
        return scan(
            *self._heads(mixed_TC),
            decay_THX.squeeze(2),  # one for each head, if it has only one
            projected.value_TGV[:, 0].float().sigmoid(),
            states_NHKV,
            batch,
            scale=spec.key_dim**-0.5,
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
        spec, gates_TX = self._spec, self._gates_of(normed_TH)
        if not spec.has_matrices:
            return self._output(attention_TX * gates_TX)
        is_kimi = spec.kind == "kimi_delta"
        gated_TX = norm_and_gate(
            attention_TX,
            self._norm_X,
            gates_TX,
            spec.norm_eps,
            activation="sigmoid" if is_kimi or spec.has_sigmoid_gate else "silu",
            rounds_norm=not is_kimi,
        )
        return self._output(gated_TX)

    def _gates_of(self, normed_TH: Tensor) -> Tensor:
        for linear in self._gates:
            normed_TH = linear(normed_TH)
        return normed_TH


class Mamba2(Recurrent):
    """A layer in which a token's step of time is its gain, and multiplies its decay."""

    def _scan(
        self,
        mixed_TC: Tensor,
        projected: Projected,
        states_NHKV: Tensor,
        batch: AttentionBatch | StateBatch,
    ) -> Tensor:
        constants = self._constants(batch)
        query_TGK, key_TGK, value_THV = self._heads(mixed_TC)
        step_TH = functional.softplus(projected.key_TGD[:, 0].float() + constants.decay_bias_A)
        read_THV = scan(
            query_TGK,
            key_TGK,
            value_THV,
            step_TH * constants.decay_H,
            step_TH,
            states_NHKV,
            batch,
            scale=1.0,
            delta=False,
            normalize=False,
        )
        skipped_THV = torch.addcmul(read_THV.float(), value_THV.float(), constants.skip_H1)
        return skipped_THV.to(read_THV.dtype)

    def output(self, attention_TX: Tensor, normed_TH: Tensor) -> Tensor:
        gates_TX, num_groups = self._gates_of(normed_TH), self._spec.num_key_heads
        eps = self._spec.norm_eps
        return self._output(
            gate_and_norm(attention_TX, self._norm_X, gates_TX, num_groups=num_groups, eps=eps)
        )


def log_decays(input_THX: Tensor, spec: RecurrentSpec, decay_H: Tensor) -> Tensor:
    """Logarithms of decays from their biased inputs, in float32; may work in place.

    Args:
        decay_H: Negative factors, one for each head.
    """
    if spec.decay_bound is None:
        return functional.softplus(input_THX).mul_(decay_H[:, None])
    return input_THX.mul_(-decay_H[:, None]).sigmoid_().mul_(spec.decay_bound)


def load_recurrent(spec: RecurrentSpec, loader: Loader, prefix: str) -> Recurrent:
    return (Mamba2 if spec.kind == "mamba2" else Recurrent)(spec, loader, prefix)


def state_layout(spec: RecurrentSpec, dtype: torch.dtype) -> StateLayout:
    return StateLayout(
        past=(spec.conv_width - 1, spec.conv_channels),
        heads=(spec.num_heads, spec.key_dim, spec.value_dim),
        past_dtype=dtype,
        heads_dtype=getattr(torch, spec.state_dtype),
    )
