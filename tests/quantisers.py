"""Matrices in every stored format, made by plain loops that share nothing with the codecs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix
from raymoe.specs.weight_format import (
    Awq,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    Gptq,
    Int8Channel,
    Mxfp4,
    Mxfp8,
    Nvfp4,
    PackedInt4,
    WeightFormat,
)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantised:
    """What a checkpoint stores of a matrix [O, I], and what that means.

    Attributes:
        tensors: By the suffix of their names.
        exact: float64 [O, I].
    """

    format: WeightFormat
    shape: tuple[int, int]
    tensors: dict[str, Tensor]
    exact: Tensor

    @property
    def matrix(self) -> StoredMatrix:
        """As the codecs take it."""
        pieces = self.format.pieces(*self.shape)
        return StoredMatrix(
            format=self.format,
            shape=self.shape,
            pieces={
                piece.name: self.tensors[piece.suffix].expand(piece.shape)
                if piece.is_repeated
                else self.tensors[piece.suffix].view(piece.shape)
                for piece in pieces
            },
        )


def quantise(
    stored: WeightFormat,
    weight_OI: Tensor,
    *,
    scale_dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Quantised:
    """Round a float matrix to a format.

    Args:
        stored: The format.
        weight_OI: The matrix.
        scale_dtype: Of scales that may have several types.
        seed: Of the order of act-order and of zero points.
    """
    make = _MAKERS[type(stored)]
    tensors, exact = make(stored, weight_OI.double().numpy(), scale_dtype, seed)
    return Quantised(
        format=stored,
        shape=tuple(weight_OI.shape),
        tensors=tensors,
        exact=torch.from_numpy(exact),
    )


def pack_words(codes: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight neighbours along an axis in a word; nibble n holds neighbour order[n]."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    codes = np.pad(codes, [(0, 0), (0, -codes.shape[1] % 8)])
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for nibble, neighbour in enumerate(order):
        words |= codes[:, neighbour::8] << np.uint32(4 * nibble)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def _fp8_block(stored: Fp8Block, weight: np.ndarray, scale_dtype: torch.dtype, _seed: int):
    rows, columns = weight.shape
    scales = np.zeros((-(-rows // 128), -(-columns // 128)))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            scales[i, j] = np.abs(tile).max() / 448 + 1e-9
    dtype = torch.float32 if scale_dtype == torch.float16 else scale_dtype
    stored_scales = torch.from_numpy(scales).to(dtype)
    wide = np.kron(stored_scales.double().numpy(), np.ones((128, 128)))[:rows, :columns]
    codes = torch.from_numpy(weight / wide).float().to(torch.float8_e4m3fn)
    tensors = {".weight": codes, stored.scales_suffix: stored_scales}
    return tensors, codes.double().numpy() * wide


def _fp8_channel(_stored: Fp8Channel, weight: np.ndarray, scale_dtype: torch.dtype, _seed: int):
    scales = torch.from_numpy(np.abs(weight).max(1, keepdims=True) / 448 + 1e-9).to(scale_dtype)
    wide = scales.double().numpy()
    codes = torch.from_numpy(weight / wide).float().to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scales}, codes.double().numpy() * wide


def _fp8_tensor(stored: Fp8Tensor, weight: np.ndarray, scale_dtype: torch.dtype, _seed: int):
    scale = torch.tensor(np.abs(weight).max() / 448 + 1e-9).to(scale_dtype)
    codes = torch.from_numpy(weight / float(scale)).float().to(torch.float8_e4m3fn)
    exact = codes.double().numpy() * float(scale)
    return {".weight": codes, stored.scales_suffix: scale}, exact


def _int8_channel(_stored: Int8Channel, weight: np.ndarray, scale_dtype: torch.dtype, _seed: int):
    """In float32 to the bits of `quantise_rows`; scales of 16 bits are rounded first."""
    largest = np.abs(weight).max(1, keepdims=True).astype(np.float32) + np.float32(1e-30)
    scales = torch.from_numpy(largest / np.float32(127)).to(scale_dtype)
    wide = scales.double().numpy()
    if scale_dtype == torch.float32:
        codes = np.round(weight.astype(np.float32) * (np.float32(127) / largest))
    else:
        codes = np.clip(np.round(weight / wide), -128, 127)
    tensors = {".weight": torch.from_numpy(codes).to(torch.int8), ".weight_scale": scales}
    return tensors, codes * wide


def _groups(columns: int, size: int, *, is_ordered: bool, seed: int) -> np.ndarray:
    """The group of each column; of act-order a random one, all of them equally large."""
    group = np.arange(columns) // (size or columns)
    return np.random.default_rng(seed).permutation(group) if is_ordered else group


def _int4(weight: np.ndarray, group: np.ndarray, scale_dtype: torch.dtype, zeros: np.ndarray):
    """Codes [O, I], scales [O, G] and numbers of INT4 with given zero points [O, G]."""
    scales = np.stack([np.abs(weight[:, group == g]).max(1) for g in range(group.max() + 1)], 1)
    stored_scales = torch.from_numpy(scales / 8 + 1e-6).to(scale_dtype)
    wide = stored_scales.double().numpy()[:, group]
    codes = np.clip(np.round(weight / wide) + zeros[:, group], 0, 15).astype(np.int64)
    return codes, stored_scales, (codes - zeros[:, group]) * wide


def _packed(stored: PackedInt4, weight: np.ndarray, scale_dtype: torch.dtype, seed: int):
    group = _groups(weight.shape[1], stored.group_size, is_ordered=stored.has_order, seed=seed)
    zeros = np.full((len(weight), group.max() + 1), 8)
    if stored.has_zero_points:
        zeros = np.random.default_rng(seed).integers(0, 16, zeros.shape)
    codes, scales, exact = _int4(weight, group, scale_dtype, zeros)
    tensors = {
        ".weight_packed": pack_words(codes, 1),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if stored.has_zero_points:
        tensors[".weight_zero_point"] = pack_words(zeros, 0)
    if stored.has_order:
        tensors[".weight_g_idx"] = torch.from_numpy(group).int()
    return tensors, exact


def _gptq(stored: Gptq, weight: np.ndarray, scale_dtype: torch.dtype, seed: int):
    """Seeds that are even have neighbours as groups and all zero points at 8."""
    is_ordered = stored.has_order and seed % 2 == 1
    group = _groups(weight.shape[1], stored.group_size, is_ordered=is_ordered, seed=seed)
    zeros = np.full((len(weight), group.max() + 1), 8)
    if seed % 2:
        zeros = np.random.default_rng(seed).integers(0, 16, zeros.shape)
    codes, scales, exact = _int4(weight, group, scale_dtype, zeros)
    tensors = {
        ".qweight": pack_words(codes.T, 0),
        ".qzeros": pack_words(zeros.T, 1) - 0x11111111,
        ".scales": scales.t().contiguous(),
    }
    if stored.has_order:
        tensors[".g_idx"] = torch.from_numpy(group).int()
    return tensors, exact


def _awq(stored: Awq, weight: np.ndarray, scale_dtype: torch.dtype, seed: int):
    group = _groups(weight.shape[1], stored.group_size, is_ordered=False, seed=seed)
    zeros = np.random.default_rng(seed).integers(0, 16, (len(weight), group.max() + 1))
    codes, scales, exact = _int4(weight, group, scale_dtype, zeros)
    tensors = {
        ".qweight": pack_words(codes.T, 1, AWQ_ORDER),
        ".qzeros": pack_words(zeros.T, 1, AWQ_ORDER),
        ".scales": scales.t().contiguous(),
    }
    return tensors, exact


def _mxfp4(stored: Mxfp4, weight: np.ndarray, _scale_dtype: torch.dtype, seed: int):
    """Codes and scales are bytes for even seeds, signed ones and torch's type for odd ones."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // 32, 32)
    largest = np.maximum(np.abs(blocks).max(-1), 2.0**-120)
    exponents = np.clip(np.floor(np.log2(largest)) - 2 + 127, 0, 254).astype(np.uint8)
    wide = 2.0 ** (exponents.astype(np.float64)[..., None] - 127)
    codes = np.abs(blocks[..., None] / wide[..., None] - E2M1).argmin(-1).astype(np.uint8)
    packed = torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << np.uint8(4))
    scales = torch.from_numpy(exponents)
    if seed % 2:
        packed, scales = packed.view(torch.int8), scales.view(torch.float8_e8m0fnu)
    if stored.scales_suffix == "_scales":
        tensors = {"_blocks": packed, "_scales": scales}
    else:
        tensors = {stored.codes_suffix: packed.flatten(1), stored.scales_suffix: scales}
    return tensors, (E2M1[codes] * wide).reshape(rows, columns)


def _mxfp8(stored: Mxfp8, weight: np.ndarray, _scale_dtype: torch.dtype, seed: int):
    """Scales are bytes for even seeds, and of torch's type for odd ones."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // 32, 32)
    largest = np.maximum(np.abs(blocks).max(-1), 2.0**-110)
    exponents = (np.ceil(np.log2(largest / 448)) + 127).astype(np.uint8)
    wide = 2.0 ** (exponents.astype(np.float64)[..., None] - 127)
    codes = torch.from_numpy(blocks / wide).float().to(torch.float8_e4m3fn)
    scales = torch.from_numpy(exponents)
    tensors = {
        ".weight": codes.view(rows, columns),
        stored.scales_suffix: scales.view(torch.float8_e8m0fnu) if seed % 2 else scales,
    }
    return tensors, (codes.double().numpy() * wide).reshape(rows, columns)


def _nvfp4(stored: Nvfp4, weight: np.ndarray, _scale_dtype: torch.dtype, seed: int):
    """The product of both scales is rounded to float32; modelopt stores a scalar."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // 16, 16)
    tensor_scale = np.float32(np.abs(weight).max() / (6 * 448) + 1e-9)
    if stored.is_divided:
        tensor_scale = np.float32(1 / tensor_scale)
    largest = np.abs(blocks).max(-1) / 6
    wanted = largest * tensor_scale if stored.is_divided else largest / tensor_scale
    scales = torch.from_numpy(np.clip(wanted, 2.0**-9, 448)).float().to(torch.float8_e4m3fn)
    numbers = scales.float().numpy()
    wide = numbers / tensor_scale if stored.is_divided else numbers * tensor_scale
    assert wide.dtype == np.float32
    codes = np.abs(blocks[..., None] / wide[..., None, None] - E2M1).argmin(-1).astype(np.uint8)
    zero = codes == 0
    codes[zero] |= (np.random.default_rng(seed).integers(0, 2, zero.sum()) * 8).astype(np.uint8)
    packed = (codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)).reshape(rows, columns // 2)
    scale = torch.tensor([tensor_scale] if stored.is_divided else tensor_scale)
    values = (torch.from_numpy(packed), scales, scale)
    suffixes = [piece.suffix for piece in stored.pieces(rows, columns)]
    exact = (E2M1[codes].astype(np.float64) * wide[..., None]).reshape(rows, columns)
    return dict(zip(suffixes, values, strict=True)), exact


_MAKERS: dict[type[WeightFormat], Callable] = {
    Fp8Block: _fp8_block,
    Fp8Channel: _fp8_channel,
    Fp8Tensor: _fp8_tensor,
    Int8Channel: _int8_channel,
    PackedInt4: _packed,
    Gptq: _gptq,
    Awq: _awq,
    Mxfp4: _mxfp4,
    Mxfp8: _mxfp8,
    Nvfp4: _nvfp4,
}
