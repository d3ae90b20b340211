"""Rotary embeddings: inverse frequencies of every scaling, and tables of cosines and sines.

T tokens, P rows of a table, R half of the rotated dimensions, S different lengths.

With two scalings the angle of a position depends on the length of its sequence. `dynamic` stretches
the base once the sequence is longer than `max_position_embeddings`; `longrope` changes to other
divisors beyond `original_max_tokens`. transformers uses the length at the moment of a forward call,
and cached keys keep their rotation. For a row that is generated alone, prompt tokens are thus
rotated for the length of the prompt, and each later token for its own position plus one. This
module defines the same: `rope_length = max(prompt_tokens, position + 1)`, which does not depend on
prefill chunks, preemption or other rows. (In a padded batch, transformers rotates for the longest
row.)
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.specs.rope import RopeSpec

_FIRST_ROWS = 4096


class Angles(NamedTuple):
    rows_T: Tensor
    cos_PR: Tensor
    sin_PR: Tensor


class Rotary:
    """Tables of one model, grown by doubling on demand; not thread-safe."""

    def __init__(self, spec: RopeSpec | None, device: torch.device | str = "cpu") -> None:
        """Without a `spec`, no dimension is rotated."""
        self._spec, self._device = spec, device
        self._num_rows = 0
        self._cos_PR = self._sin_PR = torch.empty(0, 0, device=device)

    def reserve(self, num_positions: int) -> None:
        if num_positions <= self._num_rows:
            return
        self._num_rows = max(_FIRST_ROWS, 1 << (num_positions - 1).bit_length())
        if self._spec is None:
            self._cos_PR = self._sin_PR = torch.empty(self._num_rows, 0, device=self._device)
            return
        positions_P = torch.arange(self._num_rows)
        pairs = [
            _tables(inv_R, positions_P, self._spec.attention_factor)
            for inv_R in inverse_frequencies(self._spec)
        ]
        self._cos_PR = torch.cat([cos for cos, _ in pairs]).to(self._device)
        self._sin_PR = torch.cat([sin for _, sin in pairs]).to(self._device)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the reserved positions, [P, R]."""
        return self._cos_PR, self._sin_PR

    def angles(self, positions_T: Tensor, prompt_tokens_T: Tensor | None = None) -> Angles:
        """Return the angles of tokens.

        Args:
            positions_T: int32, position of each token in its sequence, below the reserved number.
            prompt_tokens_T: int32, prompt length of each token's sequence; needed for `dynamic` and
                `longrope`.
        """
        spec = self._spec
        if spec is None or not spec.depends_on_length:
            return Angles(positions_T, self._cos_PR, self._sin_PR)
        if prompt_tokens_T is None:
            raise ConfigError(f"rope {spec.kind!r} needs the prompt length of each token")
        lengths_T = torch.maximum(prompt_tokens_T, positions_T + 1)
        if spec.kind == "longrope":
            is_long_T = lengths_T > spec.original_max_tokens
            rows_T = positions_T + self._num_rows * is_long_T.to(torch.int32)
            return Angles(rows_T, self._cos_PR, self._sin_PR)
        if not bool((lengths_T > spec.max_position_embeddings).any()):
            return Angles(positions_T, self._cos_PR, self._sin_PR)
        inv_TR = dynamic_frequencies(spec, lengths_T)
        cos_TR, sin_TR = _tables(inv_TR, positions_T, spec.attention_factor)
        rows_T = torch.arange(len(positions_T), dtype=torch.int32, device=positions_T.device)
        return Angles(rows_T, cos_TR, sin_TR)

    def scale_queries_(self, query_TAD: Tensor, positions_T: Tensor) -> None:
        """Scale queries by position, which keeps attention sharp in long contexts.

        Source: Llama 4 reference code, `attn_temperature_tuning`, with a weight per family.
        """
        spec = self._spec
        if spec is not None and spec.query_beta:
            periods_T = torch.floor(positions_T / spec.query_period)
            factors_T = 1 + spec.query_beta * torch.log(1 + periods_T)
            query_TAD.mul_(factors_T[:, None, None].to(query_TAD.dtype))


def _tables(inv_XR: Tensor, positions_P: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    angles_PR = positions_P.float()[:, None] * inv_XR
    return angles_PR.cos() * factor, angles_PR.sin() * factor


def inverse_frequencies(spec: RopeSpec) -> list[Tensor]:
    """Return inverse frequencies [R], float32; for `longrope` those of short and long sequences."""
    if spec.kind == "longrope":
        return [_longrope(spec, spec.short_factor), _longrope(spec, spec.long_factor)]
    if spec.kind == "yarn":
        return [_yarn(spec)]
    plain_R = 1.0 / _wavelengths(spec)
    if spec.kind == "proportional":
        is_rotated_R = torch.arange(len(plain_R)) < spec.num_frequencies
        return [torch.where(is_rotated_R, plain_R / spec.factor, 0.0)]
    if spec.kind == "linear":
        return [plain_R / spec.factor]
    if spec.kind == "llama3":
        return [_llama3(spec, plain_R)]
    return [plain_R]


def dynamic_frequencies(spec: RopeSpec, lengths_T: Tensor) -> Tensor:
    """Return inverse frequencies [T, R] of NTK scaling whose base grows with the length.

    Source: /u/emozilla's dynamic NTK, as `_compute_dynamic_ntk_parameters` of transformers.
    """
    dim, original = spec.rotary_dim, spec.max_position_embeddings
    lengths_S, index_T = torch.unique(lengths_T, return_inverse=True)
    stretch_S = spec.factor * lengths_S.clamp_min(original).float() / original - (spec.factor - 1)
    base_S1 = (spec.theta * stretch_S ** (dim / (dim - 2)))[:, None]
    frequencies_SR: Tensor = 1.0 / base_S1 ** _exponents(dim).to(base_S1.device)
    return frequencies_SR[index_T]


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2).float() / dim


def _wavelengths(spec: RopeSpec) -> Tensor:
    """Positions per radian of each frequency [R].

    Source: RoFormer (arXiv 2104.09864), section 3.2.2.
    """
    wavelengths_R: Tensor = spec.theta ** _exponents(spec.rotary_dim)
    return wavelengths_R


def _longrope(spec: RopeSpec, factors: tuple[float, ...]) -> Tensor:
    """Stretch each wavelength by its own factor.

    Source: LongRoPE (arXiv 2402.13753), equation 3.
    """
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _wavelengths(spec))


def _yarn(spec: RopeSpec) -> Tensor:
    """Interpolate long wavelengths, keep short ones, blend linearly between.

    Source: YaRN (arXiv 2309.00071), section 3.2, "NTK-by-parts".
    """
    dim = spec.rotary_dim
    wavelengths_R = _wavelengths(spec)

    def dimension(num_rotations: float) -> float:
        rotations = spec.original_max_tokens / (num_rotations * 2 * math.pi)
        return (dim * math.log(rotations)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp_R = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    kept_R = 1 - ramp_R
    return 1.0 / (spec.factor * wavelengths_R) * (1 - kept_R) + 1.0 / wavelengths_R * kept_R


def _llama3(spec: RopeSpec, plain_R: Tensor) -> Tensor:
    """Divide long wavelengths, keep short ones, blend smoothly between.

    Source: Llama 3.1 reference code, `apply_scaling`.
    """
    original = spec.original_max_tokens
    longest = original / spec.low_freq_factor
    shortest = original / spec.high_freq_factor
    wavelengths_R = 2 * math.pi / plain_R
    scaled_R = torch.where(wavelengths_R > longest, plain_R / spec.factor, plain_R)
    width = spec.high_freq_factor - spec.low_freq_factor
    blend_R = (original / wavelengths_R - spec.low_freq_factor) / width
    blended_R = (1 - blend_R) * scaled_R / spec.factor + blend_R * scaled_R
    is_between_R = (wavelengths_R >= shortest) & (wavelengths_R <= longest)
    return torch.where(is_between_R, blended_R, scaled_R)
