"""What a model computes, as pure data: shapes, rotations, norms, experts, layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from raymoe.errors import ConfigError, UnsupportedModelError
from raymoe.specs.config_fields import ConfigFields, check_fields, find_family
from raymoe.specs.families import QkNorm
from raymoe.specs.files import read_json_object
from raymoe.specs.rope import RopeSpec, parse_rope

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}
HEAD_DIM_MULTIPLE = 8
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer.

    Attributes:
        scale: Factor of the scores.
        sliding_window: Tokens that a query sees, itself included; None sees all.
        qk_norm: RMS norm of queries and keys before the rotation: none, per head, or full width.
        clip_qkv: Queries, keys and values are clamped to plus and minus this.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = "none"
    clip_qkv: float | None = None

    @property
    def query_width(self) -> int:
        """Outputs of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """Gated feed-forward network: down(activation(gate(x)) * up(x))."""

    hidden: int
    activation: str
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """The expert that every token visits; `is_gated` scales it by a sigmoid of its own."""

    hidden: int
    is_gated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Softmax router over all experts, top-k, gated feed-forward experts.

    Attributes:
        renormalize: Whether the chosen weights are scaled to sum to 1.
    """

    num_experts: int
    top_k: int
    expert_hidden: int
    activation: str
    renormalize: bool
    shared: SharedSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: norm, attention, residual, norm, feed-forward, residual."""

    attention: AttentionSpec
    ffn: DenseSpec | MoeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only language model, resolved from its `config.json`.

    Attributes:
        name: For people: directory or hub name.
        dtype: Type that the configuration names for the stored weights; None where it is silent.
        eos_token_ids: Of the configuration; a generation configuration may name others.
        max_context_tokens: Longest sequence that the positions were made for.
    """

    model_type: str
    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    max_context_tokens: int
    dtype: str | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; tied embeddings count once."""
        heads = 1 if self.tie_word_embeddings else 2
        layers = sum(layer_parameters(layer, self.hidden_size) for layer in self.layers)
        return layers + heads * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """Elements that one token meets: all but the experts that were not chosen."""
        idle = 0
        for layer in self.layers:
            if isinstance(layer.ffn, MoeSpec):
                per_expert = 3 * layer.ffn.expert_hidden * self.hidden_size
                idle += (layer.ffn.num_experts - layer.ffn.top_k) * per_expert
        return self.num_parameters - idle

    def weight_bytes(self, bytes_per_parameter: float) -> int:
        """Bytes of all weights."""
        return int(self.num_parameters * bytes_per_parameter)

    def kv_bytes_per_token(self, bytes_per_element: float) -> int:
        """Bytes of KV that one token adds, all layers together."""
        return int(sum(2 * layer.attention.kv_width for layer in self.layers) * bytes_per_element)

    @classmethod
    def from_config(cls, config: Mapping[str, object], name: str = "") -> Self:
        """Build from the content of a `config.json` that transformers 4 or 5 wrote.

        Raises:
            UnsupportedModelError: The model type is unknown, or a field is unknown or has a value
                whose mathematics is not implemented. Nothing is guessed.
            ConfigError: A value has the wrong type or size.
        """
        model_type, family = find_family(config)
        check_fields(config, model_type, family)
        fields = ConfigFields(config, family)
        hidden_size = fields.positive("hidden_size")
        attention = _attention(fields, hidden_size)
        rope = parse_rope(
            config,
            head_dim=attention.head_dim,
            max_position_embeddings=fields.positive("max_position_embeddings"),
            default_theta=family.default_theta,
            is_partial_supported=family.is_rope_partial,
        )
        return cls(
            model_type=model_type,
            name=name or str(config.get("_name_or_path") or model_type),
            hidden_size=hidden_size,
            vocab_size=fields.positive("vocab_size"),
            layers=_layers(fields, attention),
            norm_eps=fields.number("rms_norm_eps"),
            rope=rope,
            tie_word_embeddings=fields.boolean("tie_word_embeddings"),
            max_context_tokens=rope.max_context_tokens,
            dtype=_dtype(config),
            eos_token_ids=fields.token_ids("eos_token_id"),
        )

    @classmethod
    def from_directory(cls, path: Path | str) -> Self:
        """Build from the `config.json` of a model directory.

        Raises:
            CheckpointError: The file is missing, unsafe or not a JSON object.
            UnsupportedModelError: As for `from_config`.
        """
        directory = Path(path)
        return cls.from_config(read_json_object(directory, "config.json"), name=_name(directory))


def _name(directory: Path) -> str:
    """What people call the model: the directory, or the hub name of a snapshot in its cache."""
    root = directory.resolve()
    cache = root.parent.parent.name
    if root.parent.name == "snapshots" and cache.startswith("models--"):
        return cache.removeprefix("models--").replace("--", "/")
    return root.name


def layer_parameters(layer: LayerSpec, hidden_size: int) -> int:
    """Elements of the weights of one layer."""
    attention, ffn = layer.attention, layer.ffn
    outputs = attention.query_width + 2 * attention.kv_width
    count = 2 * hidden_size + hidden_size * (outputs + attention.query_width)
    count += outputs * attention.qkv_bias + hidden_size * attention.output_bias
    if attention.qk_norm == "head":
        count += 2 * attention.head_dim
    elif attention.qk_norm == "full":
        count += attention.query_width + attention.kv_width
    if isinstance(ffn, DenseSpec):
        return count + 3 * ffn.hidden * hidden_size + ffn.has_bias * (2 * ffn.hidden + hidden_size)
    count += ffn.num_experts * (hidden_size + 3 * ffn.expert_hidden * hidden_size)
    if ffn.shared is not None:
        count += 3 * ffn.shared.hidden * hidden_size + hidden_size * ffn.shared.is_gated
    return count


def _attention(fields: ConfigFields, hidden_size: int) -> AttentionSpec:
    """Attention of a layer without a window."""
    family = fields.family
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive_or_none("num_key_value_heads") or num_heads
    head_dim = fields.positive_or_none("head_dim") or hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads is {num_heads}, not a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    if head_dim % HEAD_DIM_MULTIPLE or head_dim < HEAD_DIM_MULTIPLE:
        raise UnsupportedModelError(
            f"head_dim is {head_dim}; supported: multiples of {HEAD_DIM_MULTIPLE}"
        )
    if family.qk_norm == "full" and num_heads * head_dim != hidden_size:
        raise UnsupportedModelError(
            f"head_dim {head_dim} x {num_heads} heads is not hidden_size {hidden_size}: "
            "the norm over the full width of this family needs them equal"
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=fields.switch(family.qkv_bias),
        output_bias=fields.switch(family.output_bias),
        qk_norm=family.qk_norm,
        clip_qkv=fields.number("clip_qkv") if fields.has("clip_qkv") else None,
    )


def _layers(fields: ConfigFields, attention: AttentionSpec) -> tuple[LayerSpec, ...]:
    num_layers = fields.positive("num_hidden_layers")
    windows = fields.windows(num_layers)
    dense, moe = _dense(fields), _moe(fields)
    sparse_step = fields.positive("decoder_sparse_step") if fields.has("decoder_sparse_step") else 1
    always_dense = fields.integers("mlp_only_layers")
    variants = {window: _with_window(attention, window) for window in set(windows)}
    layers = []
    for i, window in enumerate(windows):
        is_sparse = moe is not None and i not in always_dense and (i + 1) % sparse_step == 0
        ffn = moe if is_sparse and moe is not None else dense
        layers.append(LayerSpec(attention=variants[window], ffn=ffn))
    return tuple(layers)


def _with_window(attention: AttentionSpec, window: int | None) -> AttentionSpec:
    return replace(attention, sliding_window=window)


def _dense(fields: ConfigFields) -> DenseSpec:
    return DenseSpec(
        hidden=fields.positive("intermediate_size"),
        activation=_activation(fields),
        has_bias=fields.switch(fields.family.mlp_bias),
    )


def _moe(fields: ConfigFields) -> MoeSpec | None:
    family = fields.family
    if family.num_experts is None or family.expert_hidden is None:
        return None
    num_experts = fields.natural(family.num_experts)
    if num_experts == 0:
        return None
    top_k = fields.positive("num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"num_experts_per_tok is {top_k}, but there are {num_experts} experts")
    shared = None
    if family.shared_hidden is not None:
        shared = SharedSpec(hidden=fields.positive(family.shared_hidden), is_gated=True)
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        expert_hidden=fields.positive(family.expert_hidden),
        activation=_activation(fields),
        renormalize=family.renormalize is None or fields.boolean(family.renormalize),
        shared=shared,
    )


def _activation(fields: ConfigFields) -> str:
    name = fields.get("hidden_act")
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act = {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[str(name)]


def _dtype(config: Mapping[str, object]) -> str | None:
    value = config.get("dtype")
    value = config.get("torch_dtype") if value is None else value
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"dtype = {value!r} is not supported; supported: {', '.join(DTYPES)}"
        )
    return name
