"""A model's computation and weight storage, as pure data."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Self

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.attention.compressed import GROUPED_OUTPUT
from raymoe.specs.attention.grouped import AttentionSpec
from raymoe.specs.attention.kind import INDEXER, AttentionKind
from raymoe.specs.attention.latent import KV_UP, LatentAttentionSpec
from raymoe.specs.attention.ngrams import NGRAM_TABLE
from raymoe.specs.attention.recurrent import RecurrentSpec
from raymoe.specs.class_defaults import ClassDefaults, class_defaults
from raymoe.specs.config import (
    ConfigFields,
    HeadKind,
    canonical_config,
    check_fields,
    find_family,
    head_of,
    labels_of,
    log_unread,
)
from raymoe.specs.families import in_class_fields, text_part
from raymoe.specs.families.stored_names import namings_of
from raymoe.specs.files import read_config
from raymoe.specs.layer_config import (
    parse_attention,
    parse_latent_attention,
    parse_layers,
    parse_streams,
)
from raymoe.specs.layer_weights import (
    LAYER_NUMBER,
    attention_weights,
    common_weights,
    expert_parameters,
    expert_weights,
    layer_parameters,
    layer_prefix,
    outer_weights,
)
from raymoe.specs.layers import (
    ClampSpec,
    DenseSpec,
    LayerSpec,
    MoeSpec,
    NormKind,
    RouterSpec,
    SharedSpec,
)
from raymoe.specs.module_patterns import name_or_expression
from raymoe.specs.ngram_config import ngram_layers
from raymoe.specs.quantization import Quantization, parse_quantization
from raymoe.specs.rope import RopeSpec, parse_rope
from raymoe.specs.streams import AnyStreamsSpec
from raymoe.specs.weight_format import PLAIN_FORMATS, Fp8Block, Int8Channel, WeightFormat
from raymoe.specs.weights import Shape, Weight, num_elements, shapes

__all__ = [
    "OVERFLOWS_IN_FLOAT16",
    "AttentionSpec",
    "ClampSpec",
    "DenseSpec",
    "LatentAttentionSpec",
    "LayerSpec",
    "ModelSpec",
    "MoeSpec",
    "RecurrentSpec",
    "RouterSpec",
    "SharedSpec",
]

# Types of models that were trained in bfloat16 with hidden states beyond 65504.
OVERFLOWS_IN_FLOAT16 = {"gpt_oss", "gemma3_text", "gemma4_text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only language model, resolved from its `config.json`.

    Examples:
        >>> model = raymoe.ModelSpec.from_directory(raymoe.demo_model_path())
        >>> model.model_type, model.num_active_parameters < model.num_parameters
        ('mixtral', True)

    Attributes:
        name: Directory or hub name, for messages.
        norm: Kind of all norms but those of latents; norms of queries and keys are RMS norms.
        dtype: Type of the stored weights; None if the configuration does not name one.
        max_model_len: Longest sequence that the positions support with full attention.
        embedding_multiplier: Factor of the token embeddings.
        rounds_embedding_multiplier: Whether it is rounded to the type of the embeddings first.
        residual_multiplier: Factor of what attention and feed-forward network add.
        logit_softcap: c, where logits become c * tanh(logits / c) at last; None for no such bound.
        has_head_bias: Whether the logits have a bias.
        has_float_head: Whether logits are computed in float32, whatever the type of the model is.
        quantization: Formats of stored matrices; None if all are stored in `dtype`.
        head: What turns final hidden states into the rows that a step yields: "lm" (logits of
            tokens), "labels" (logits of `labels`, by `score.weight`) or "none".
        labels: Names of the classes of a model with a classification head, in order.
        is_multi_label: Whether each label has a probability of its own.
        wrapper: `model_type` of the whole whose text part this is.
        media_tokens: Ids of tokens that stand for other media, with the names of their fields.
        num_shards: Ranks that divide heads and hidden columns; `layers` is one rank's part
            (`specs.tensor_shards`).
    """

    model_type: str
    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_word_embeddings: bool
    max_model_len: int
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    norm: NormKind = "rms"
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logit_softcap: float | None = None
    has_head_bias: bool = False
    has_float_head: bool = False
    quantization: Quantization | None = None
    head: HeadKind = "lm"
    labels: tuple[str, ...] = ()
    is_multi_label: bool = False
    wrapper: str | None = None
    media_tokens: tuple[tuple[int, str], ...] = ()
    num_shards: int = 1

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotations of the layers, in order of the first layer of each."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def depends_on_length(self) -> bool:
        """Whether the KV of a token depends on the length of its sequence."""
        return any(rope.depends_on_length for rope in self.ropes)

    def prefix_salt(self, prompt_tokens: int) -> bytes:
        """Differs between lengths of prompts that have other KV where they begin the same."""
        return b"".join(rope.variant(prompt_tokens).to_bytes(4, "little") for rope in self.ropes)

    @property
    def restart_length(self) -> int | None:
        """Length beyond which a row computes all its KV again; None if it never does."""
        return next((rope.restart_length for rope in self.ropes), None)

    @property
    def streams(self) -> AnyStreamsSpec | None:
        """Those of the hidden state, which all layers share; None if it is one."""
        return self.layers[0].streams

    @property
    def residual_size(self) -> int:
        """Elements of a token's hidden state between blocks, all streams together."""
        return self.hidden_size * (1 if self.streams is None else self.streams.count)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_past_tokens(self) -> int:
        """Tokens before those of a step that decide what they read, besides KV and states."""
        found = [layer.ngrams.num_past for layer in self.layers if layer.ngrams is not None]
        return max(found, default=0)

    @property
    def table_bytes(self) -> int:
        """Bytes of tables of n-grams, which the host keeps as they are stored."""
        found = [layer.ngrams.table_bytes for layer in self.layers if layer.ngrams is not None]
        return sum(found)

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state per sequence, instead of a KV cache or beside it."""
        return any(layer.attention.has_state for layer in self.layers)

    @property
    def cache_window(self) -> int | None:
        """How many last tokens layers with a window keep in the cache; None if all layers keep all.

        That of the longest window, and at least 2, so that a sequence keeps its last block. A model
        of which every layer has a window keeps all tokens, as does one with states.
        """
        windows = [layer.attention.cache_window for layer in self.layers]
        if None not in windows or self.has_states:
            return None
        return max((max(2, window) for window in windows if window is not None), default=None)

    @property
    def has_states_beside_kv(self) -> bool:
        """Whether some layers keep a state and KV at once."""
        attentions = [layer.attention for layer in self.layers]
        return any(each.has_state and each.cache_width for each in attentions)

    @property
    def has_latent_experts(self) -> bool:
        """Whether experts read a latent of the hidden state; then all layers with experts do."""
        return any(layer.moe is not None and layer.moe.latent_size for layer in self.layers)

    @property
    def expert_input_size(self) -> int:
        """Width of what experts read and write; the hidden size if there are none."""
        sizes = (
            layer.moe.input_size(self.hidden_size) for layer in self.layers if layer.moe is not None
        )
        return max(sizes, default=self.hidden_size)

    @property
    def norm_offset(self) -> float | None:
        """What is added to the weights of RMS norms; None if normed values are rounded first."""
        return {"rms_float32": 0.0, "rms_plus_one": 1.0}.get(self.norm)

    @property
    def has_norm_bias(self) -> bool:
        return any(layer.has_norm_bias for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; tied embeddings count once."""
        layers = sum(layer_parameters(layer, self.hidden_size) for layer in self.layers)
        return layers + num_elements(self._outer_weights())

    @property
    def num_active_parameters(self) -> int:
        """Elements that one token uses: all but experts and n-grams that were not chosen."""
        idle = 0
        for layer in self.layers:
            if layer.ngrams is not None:
                idle += layer.ngrams.num_rows * layer.ngrams.row_width - layer.ngrams.width
            if layer.moe is not None:
                num_idle = layer.moe.num_experts - layer.moe.top_k
                idle += num_idle * expert_parameters(layer.moe, self.hidden_size)
        return self.num_parameters - idle

    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights in a checkpoint; bfloat16 if the configuration names no type."""
        plain = PLAIN_FORMATS[self.dtype or "bfloat16"]
        return self.weight_bytes(plain.item_bytes) + self.table_bytes

    def weight_bytes(self, bytes_per_element: int) -> int:
        """Bytes of all weights: as stored if quantised, else `bytes_per_element` each.

        Without `table_bytes`, of which a step reads a few rows.
        """
        total = self.bytes_of(self._outer_weights(), bytes_per_element)
        for i, layer in enumerate(self.layers):
            total += self.bytes_of(attention_weights(layer, self.hidden_size), bytes_per_element, i)
            total += self.bytes_of(common_weights(layer, self.hidden_size), bytes_per_element, i)
            if layer.moe is not None:
                expert = expert_weights(layer.moe, self.hidden_size)
                total += layer.moe.num_experts * self.bytes_of(expert, bytes_per_element, i)
        return total

    def bytes_of(
        self, weights: Iterable[Weight], bytes_per_element: int, layer: int | None = None
    ) -> int:
        """Bytes of these weights, as `weight_bytes`; names lack the prefix of `layer`."""
        prefix = "" if layer is None else layer_prefix(layer)
        total = 0
        for name, shape, *_ in weights:
            stored = self.format_of(prefix + name, shape)
            if stored is None:
                total += prod(shape) * bytes_per_element
            else:
                total += stored.matrix_bytes(*shape)
        return total

    def format_of(self, name: str, shape: Shape) -> WeightFormat | None:
        """The format in memory: None for matrices that are decoded while they are loaded."""
        if self.quantization is None or self.quantization.is_decoded(name):
            return None
        return self.stored_format_of(name, shape)

    def stored_format_of(self, name: str, shape: Shape) -> WeightFormat | None:
        """The format in a checkpoint."""
        if self.quantization is None or len(shape) != 2 or NGRAM_TABLE in name:
            return None
        found = LAYER_NUMBER.search(name)
        if found is not None and self.num_past_tokens:
            name = f"{layer_prefix(self.stored_layer(int(found[1])))}{name[found.end() :]}"
        return self.quantization.format_of(name, self._stored_modules)

    def _stored_modules(self, name: str) -> Iterator[str]:
        """Names that this family has for a matrix's module, or for the one that it is a part of."""
        found = LAYER_NUMBER.search(name)
        if found is None:
            return
        i, rest = int(found[1]), name[found.end() :]
        for naming in namings_of(self.model_type, self.wrapper, is_own=True):
            number, module = i, naming.module_of(rest)
            if naming.numbers_networks:
                number += sum(layer.has_network for layer in self.layers[: i + 1])
                number -= self.layers[i].has_network and not rest.startswith("mlp.")
            elif f"{module}.weight" == rest:  # it says nothing of this module
                continue
            yield naming.layers.format(layer=number) + module

    def stored_layer(self, i: int) -> int:
        """The number of layer `i` in checkpoints, where layers of n-grams are part of the next."""
        return i - sum(layer.ngrams is not None for layer in self.layers[:i])

    @property
    def head_shape(self) -> Shape:
        """Shape of the head's matrix; no rows if there is none."""
        rows = {"lm": self.vocab_size, "labels": len(self.labels), "none": 0}
        return rows[self.head], self.hidden_size

    def with_head(self, head: HeadKind) -> Self:
        """This model with another head; only that of a language model is scaled, tied or biased."""
        if head == "lm":
            return self
        return replace(
            self,
            head=head,
            tie_word_embeddings=False,
            has_head_bias=False,
            logits_divisor=1.0,
            logit_softcap=None,
        )

    def with_int8(self, *, has_plain_networks: bool = False) -> Self:
        """This model with matrices in int8 in memory, and a head of its own.

        Matrices stay as they are that are multiplied by kernels for bfloat16 alone, or are part of
        what attention chooses by.

        Args:
            has_plain_networks: So do those of networks and experts.
        """
        plain = [INDEXER, KV_UP, GROUPED_OUTPUT, *(["mlp."] if has_plain_networks else [])]
        patterns = [f"re:.*{re.escape(part)}.*" for part in plain]
        int8 = Quantization(
            method="int8",
            format=Int8Channel(is_rotated=True),
            excluded=tuple(map(name_or_expression, patterns)),
            is_head_plain=False,
        )
        return replace(self, quantization=int8, tie_word_embeddings=False)

    def with_state_dtype(self, state_dtype: str) -> Self:
        """This model with states of another type in memory; one without states stays."""
        if not self.has_states:
            return self
        return self._with_attention(lambda each: each.with_state_dtype(state_dtype))

    def with_table_dtype(self, dtype: str | None) -> Self:
        """This model with tables of n-grams of this type; None leaves them."""
        if dtype is None or not self.num_past_tokens:
            return self
        return self._with_attention(lambda each: each.with_table_dtype(dtype))

    def _with_attention(self, change: Callable[[AttentionKind], AttentionKind]) -> Self:
        layers = tuple(replace(layer, attention=change(layer.attention)) for layer in self.layers)
        return self if layers == self.layers else replace(self, layers=layers)

    def within(self, max_model_len: int | None) -> Self:
        """This model for sequences of at most so many tokens: without indexers that choose all."""
        length = min(self.max_model_len, max_model_len or self.max_model_len)
        return self._with_attention(lambda each: each.within(length))

    def outer_weights(self) -> dict[str, Shape]:
        return shapes(self._outer_weights())

    def _outer_weights(self) -> Iterator[Weight]:
        return outer_weights(
            self.vocab_size,
            self.hidden_size,
            head_rows=0 if self.tie_word_embeddings else self.head_shape[0],
            has_head_bias=self.has_head_bias,
            has_norm_bias=self.has_norm_bias,
            streams=self.streams,
        )

    def check_int8_kv(self) -> None:
        """Raise `ConfigError` where some layer's KV cannot be int8."""
        for i, layer in enumerate(self.layers):
            if not layer.attention.allows_int8_kv:
                raise ConfigError(
                    "kv_dtype is 'int8', which only plain keys and values of grouped-query "
                    f"attention can have; layer {i} keeps latents, index keys or entries: leave "
                    "kv_dtype at 'auto'"
                )

    def kv_bytes_per_token(self, bytes_per_element: float) -> int:
        return int(sum(layer.attention.cache_width for layer in self.layers) * bytes_per_element)

    def state_bytes(self, bytes_per_element: int) -> int:
        """Bytes that a sequence of any length keeps in layers with a state."""
        return sum(layer.attention.state_bytes(bytes_per_element) for layer in self.layers)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        name: str = "",
        *,
        defaults: ClassDefaults | None = None,
    ) -> Self:
        """Build from the content of a `config.json` that transformers 4 or 5 wrote.

        Args:
            defaults: Values of missing fields; None for those of transformers' class.

        Raises:
            UnsupportedModelError: The model type, a field or a value is unknown; nothing is
                guessed.
            ConfigError: A value has the wrong type or size.
        """
        part = text_part(config)
        config = part.config
        model_type, family = find_family(config)
        if defaults is None:
            defaults = class_defaults(model_type, family.nested)
        config = in_class_fields(config, model_type, defaults)
        config = canonical_config(config, family, defaults)
        name = name or str(config.get("_name_or_path") or model_type)
        log_unread(name, model_type, check_fields(config, model_type, family, defaults))
        fields = ConfigFields(config, family, defaults)
        attention = parse_latent_attention(fields) if family.is_latent else parse_attention(fields)
        layers = _parse_layers(fields, config, attention, defaults)
        hidden_size = fields.positive("hidden_size")
        embedding, residual, logits = _multipliers(fields, hidden_size)
        rms_norm_eps = fields.number_or_none(family.rms_norm_eps)
        head = head_of(config)
        return cls(
            model_type=model_type,
            name=name,
            hidden_size=hidden_size,
            vocab_size=fields.positive("vocab_size"),
            layers=layers,
            norm=family.norm if rms_norm_eps is None else "rms",
            norm_eps=rms_norm_eps or fields.number_or(family.norm_eps),
            tie_word_embeddings=fields.boolean("tie_word_embeddings"),
            max_model_len=_max_model_len(fields, layers),
            dtype=_dtype(config),
            eos_token_ids=fields.token_ids("eos_token_id"),
            embedding_multiplier=embedding,
            rounds_embedding_multiplier=family.rounds_embedding_scale,
            residual_multiplier=residual,
            logits_divisor=logits,
            logit_softcap=fields.number_or_none(family.logit_softcap),
            has_float_head=family.has_float_head,
            has_head_bias=fields.switch(family.head_bias),
            quantization=_quantization(fields, config),
            labels=labels_of(config) if head == "labels" else (),
            wrapper=part.wrapper,
            media_tokens=part.media_tokens,
            is_multi_label=config.get("problem_type") == "multi_label_classification",
        ).with_head(head)

    @classmethod
    def from_directory(cls, path: Path | str) -> Self:
        """Build from the configuration of a model directory (`read_config`).

        Raises:
            CheckpointError: The file is missing, unsafe or not a JSON object.
            UnsupportedModelError: As for `from_config`.
        """
        directory = Path(path)
        return cls.from_config(read_config(directory), name=_name(directory))


def _parse_layers(
    fields: ConfigFields,
    config: Mapping[str, object],
    attention: AttentionSpec | LatentAttentionSpec,
    defaults: ClassDefaults,
) -> tuple[LayerSpec, ...]:
    """All layers, those of n-grams each before the one that a configuration counts it to."""
    layers = parse_layers(fields, attention, partial(_rope, fields, defaults))
    is_quantised = config.get("quantization_config") is not None
    streams, dtype = parse_streams(fields), _dtype(config)
    added = ngram_layers(fields, streams, is_quantised=is_quantised, dtype=dtype)
    pairs = ((added.get(i), layer) for i, layer in enumerate(layers))
    return tuple(layer for pair in pairs for layer in pair if layer is not None)


def _quantization(fields: ConfigFields, config: Mapping[str, object]) -> Quantization | None:
    family = fields.family
    found = parse_quantization(
        config.get("quantization_config"), family.module_names, config.get("expert_dtype")
    )
    is_grouped = family.grouped_qkv is not None and fields.has(family.grouped_qkv)
    if found is None or not is_grouped:
        return found
    if not any(isinstance(each, Fp8Block) for each in found.formats):
        return found
    # Scales of a group begin at its first row, which need not be that of a block of all rows.
    return replace(found, decoded=tuple(f"self_attn.{part}_proj.weight" for part in "qkv"))


def _multipliers(fields: ConfigFields, hidden_size: int) -> tuple[float, float, float]:
    """Factors of embeddings and residual branches, and the divisor of the logits."""
    family = fields.family
    embedding, residual, logits = map(fields.number_or, family.multipliers)
    if fields.switch(family.scales_embedding):
        embedding *= hidden_size**0.5
    if family.logit_scale is not None:
        logits = 1.0 / fields.number(family.logit_scale)
    return embedding, residual, logits


def _max_model_len(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> int:
    ropes = {layer.rope for layer in layers if layer.rope is not None}
    max_positions = fields.positive("max_position_embeddings")
    return max((rope.max_model_len for rope in ropes), default=max_positions)


def _rope(
    fields: ConfigFields,
    defaults: ClassDefaults,
    layer_type: str,
    attention: AttentionKind,
) -> RopeSpec:
    rule, head_dim = fields.family.rope, attention.rotated_head_dim
    if rule.is_part_of_head and isinstance(attention, LatentAttentionSpec):
        rule = replace(rule, is_partial=True, partial_factor=head_dim / attention.query_head_dim)
        head_dim = attention.query_head_dim
    config = {
        name: value for name, value in fields.config.items() if name not in fields.family.ignored
    }
    original = defaults.values.get("original_max_position_embeddings")
    rope = parse_rope(
        {"original_max_position_embeddings": original, **config} if original else config,
        head_dim=head_dim,
        max_position_embeddings=fields.positive("max_position_embeddings"),
        rule=rule,
        default_theta=defaults.theta,
        layer_type=layer_type,
    )
    if rule.is_part_of_head and rope.rotary_dim != attention.rotated_head_dim:
        raise UnsupportedModelError(
            f"partial_rotary_factor rotates {rope.rotary_dim} dimensions of a query; this "
            f"model_type has qk_rope_head_dim = {attention.rotated_head_dim}"
        )
    return rope


def _name(directory: Path) -> str:
    """The directory's name, or the hub name of a snapshot in the hub cache."""
    root = directory.resolve()
    cache = root.parent.parent.name
    if root.parent.name == "snapshots" and cache.startswith("models--"):
        return cache.removeprefix("models--").replace("--", "/")
    return root.name


def _dtype(config: Mapping[str, object]) -> str | None:
    value = config.get("dtype")
    value = config.get("torch_dtype") if value is None else value
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in PLAIN_FORMATS:
        raise UnsupportedModelError(
            f"dtype = {value!r} is not supported; supported: {', '.join(PLAIN_FORMATS)}"
        )
    return name
