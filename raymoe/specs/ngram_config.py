"""Read layers that add embeddings of n-grams (PLE of Qwen4) from a configuration."""

from collections.abc import Mapping
from functools import lru_cache
from math import isqrt

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.attention.ngrams import MAX_TABLE_TENSORS, TABLE_BYTES, NgramLayerSpec, NgramSpec
from raymoe.specs.config import ConfigFields
from raymoe.specs.families.published import LINEAR
from raymoe.specs.families.rules import NgramRule
from raymoe.specs.layers import DenseSpec, LayerSpec, NormLayout
from raymoe.specs.streams import AnyStreamsSpec

MAX_TAPS = 16  # of a convolution, as in native/include/raymoe/state.h
MAX_TOKENS, MAX_HASHES = 8, 128  # of an n-gram, and of each length: over twice the published values
MAX_ROWS = 1 << 28  # of the part of a hash; 13 times the published value
_WORD = (1 << 64) - 1
_NO_NORMS = NormLayout(before_attention=False, before_ffn=False)


def ngram_layers(
    fields: ConfigFields, streams: AnyStreamsSpec | None, *, is_quantised: bool, dtype: str | None
) -> Mapping[int, LayerSpec]:
    """The layers that come before those of these numbers; none in most families.

    Args:
        is_quantised: Whether matrices of the model are; then the table is FP8 as well.
        dtype: Type of the stored weights; bfloat16 if the configuration names none.
    """
    rule = fields.family.ngrams
    numbers = frozenset[int]() if rule is None else fields.integers(rule.layers)
    if rule is None or not numbers:
        return {}
    assert streams is not None, "their family has streams"
    kinds, num_layers = fields.layer_types, fields.positive("num_hidden_layers")
    if not all(1 <= number <= num_layers for number in numbers):
        raise ConfigError(f"{rule.layers} is {sorted(numbers)}; there are {num_layers} layers")
    assert isinstance(kinds, list), "it was checked with the layers"
    if any(kinds[number - 1] != LINEAR for number in numbers):
        raise UnsupportedModelError(
            f"{rule.layers} is {sorted(numbers)}; supported: layers of type {LINEAR}, as in "
            "transformers"
        )
    table_dtype = "float8_e4m3fn" if is_quantised else dtype or "bfloat16"
    assert table_dtype in TABLE_BYTES, "checked with the configuration"
    return {
        number - 1: _layer(fields, rule, streams, place=place, dtype=table_dtype)
        for place, number in enumerate(sorted(numbers))
    }


def _layer(
    fields: ConfigFields, rule: NgramRule, streams: AnyStreamsSpec, *, place: int, dtype: str
) -> LayerSpec:
    longest, taps = (
        fields.positive(rule.longest, maximum=MAX_TOKENS),
        fields.positive(rule.conv_width, maximum=MAX_TAPS),
    )
    conv_width = (taps - 1) * longest + 1
    if longest < 2 or not 2 <= conv_width <= MAX_TAPS:
        raise UnsupportedModelError(
            f"{rule.longest} is {longest} and {rule.conv_width} {taps}: a convolution of "
            f"{conv_width} tokens; supported: n-grams of at least 2, convolutions of 2 to "
            f"{MAX_TAPS}"
        )
    width = streams.count * fields.positive("hidden_size")
    attention = NgramLayerSpec(
        ngrams=_ngrams(fields, rule, longest, place=place, dtype=dtype),
        width=width,
        conv_width=conv_width,
        dilation=longest,
        norm_eps=fields.number_or(fields.family.norm_eps),
    )
    return LayerSpec(
        attention=attention,
        ffn=DenseSpec(hidden=0, activation="silu"),
        rope=None,
        norms=_NO_NORMS,
        streams=streams,
    )


def _ngrams(
    fields: ConfigFields, rule: NgramRule, longest: int, *, place: int, dtype: str
) -> NgramSpec:
    num_hashes = (longest - 1) * fields.positive(rule.hashes, maximum=MAX_HASHES)
    width = fields.positive_or_none(rule.width) or fields.positive("hidden_size")
    if width % num_hashes:
        raise ConfigError(f"{rule.width} is {width}, not a multiple of {num_hashes} hashes")
    separators = fields.token_ids("eos_token_id")
    if not separators:
        raise ConfigError(f"{rule.layers} needs eos_token_id, which ends n-grams; it is missing")
    smallest = fields.positive(rule.rows, maximum=MAX_ROWS)
    sizes = _primes(smallest, (place + 1) * num_hashes)[place * num_hashes :]
    multiple = fields.positive(rule.multiple, maximum=MAX_ROWS)
    return NgramSpec(
        multipliers=_multipliers(
            fields.natural(rule.seed), place, fields.positive("vocab_size"), longest
        ),
        sizes=sizes,
        num_rows=-(-sum(sizes) // multiple) * multiple,
        row_width=width // num_hashes,
        num_tensors=fields.positive(rule.tensors, maximum=MAX_TABLE_TENSORS),
        separator=separators[0],
        dtype=dtype,
    )


@lru_cache
def _primes(smallest: int, count: int) -> tuple[int, ...]:
    found: list[int] = []
    number = smallest
    while len(found) < count:
        if number > 1 and all(number % factor for factor in range(2, isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)


def _multipliers(seed: int, place: int, vocab_size: int, count: int) -> tuple[int, ...]:
    """Odd numbers whose products with token ids fit 63 bits, as the class draws them."""
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    start = seed + 10007 * place
    step = 0x9E3779B97F4A7C15
    return tuple(2 * (_mixed(start + step * (i + 1)) % half) + 1 for i in range(count))


def _mixed(value: int) -> int:
    """The output of SplitMix64 (Steele et al., OOPSLA 2014) after the state `value`."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
