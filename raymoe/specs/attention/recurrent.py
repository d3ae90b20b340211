"""Layers that keep a state of fixed size in place of KV."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from raymoe.specs.attention.kind import AttentionKind, TokenShapes
from raymoe.specs.attention.work import AttentionWork, ElementBytes, StateWork
from raymoe.specs.weights import Reader, Weight, linear

RECURRENT = "linear_attn."
RecurrentKind = Literal["gated_delta", "kimi_delta", "mamba2", "short_conv"]
STATE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}  # of an element, by type


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec(AttentionKind):
    """A layer that keeps a state of fixed size per sequence in place of KV (linear attention).

    A causal convolution over the last `conv_width` tokens follows the projections of queries, keys
    and values. Each head then updates a matrix of `key_dim` x `value_dim` by its keys and values,
    after a decay, and multiplies it by its query. A short convolution has no such matrix, so that
    `key_dim` is zero, and convolves the product of two projections.

    Mamba-2 writes its x as values by the keys B and reads by the queries C, each scaled by a step
    of time that decides the decay as well. It adds `D` times its values to what it reads, and norms
    the gated result over groups of heads, one for each head of keys.

    Kimi Delta Attention has a decay for each dimension of a key, where the others have one for each
    head. Its decay and its gate come from latents of their own, or from the hidden state.

    Sources: Gated DeltaNet (arXiv 2412.06464), Kimi Linear (arXiv 2510.26692), Mamba-2 (arXiv
    2405.21060).
    """

    kind: RecurrentKind
    num_key_heads: int  # heads of queries and keys; each serves as many heads of values
    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    has_conv_bias: bool = False
    has_bias: bool = False  # biases of the projections
    # Width of the latents that decay and gate are projected from; None: from the hidden state.
    latent_width: int | None = None
    # Lower bound of the logarithm of a decay, whose share of it a sigmoid gives; None: no bound,
    # by a softplus.
    decay_bound: float | None = None
    state_dtype: str = "float32"  # of the matrices in memory; one of STATE_BYTES
    has_sigmoid_gate: bool = False  # whether the gate of gated delta is a sigmoid, not a silu

    @property
    def has_matrices(self) -> bool:
        """Whether there is a state besides the last inputs of the convolution."""
        return self.key_dim > 0

    @property
    def projections(self) -> dict[str, int]:
        """Outputs of the projections that the convolution mixes."""
        key = self.num_key_heads * self.key_dim
        widths = {"q": key, "k": key, "v": self.output_width}
        return {part: width for part, width in widths.items() if width}

    @property
    def inputs(self) -> dict[str, int]:
        """Outputs of all projections of the hidden state before the convolution."""
        decay = {"a": self.decay_width}
        if self.latent_width is not None:
            decay = {"f_a": self.latent_width}
        widths = self.projections | decay | {"b": self.gain_width}
        return {part: width for part, width in widths.items() if width}

    @property
    def latent_outputs(self) -> dict[str, int]:
        """Outputs of the projections from the latents of decay and gate."""
        if self.latent_width is None:
            return {}
        return {"f_b": self.decay_width, "g_b": self.gate_width}

    @property
    def conv_channels(self) -> int:
        return sum(self.projections.values())

    @property
    def decay_width(self) -> int:
        """Outputs of the projection that the decay of a token comes from."""
        if self.kind == "kimi_delta":
            return self.num_heads * self.key_dim
        return self.num_heads if self.has_matrices else 0

    @property
    def gain_width(self) -> int:
        """Outputs of the projection that says how much of a token is written to the state."""
        if self.kind == "mamba2":
            return 0
        return self.num_heads if self.has_matrices else self.output_width

    @property
    def gate_width(self) -> int:
        return self.output_width

    @property
    def norm_width(self) -> int:
        """Elements of the weight of the norm of what is read."""
        return self.output_width if self.kind == "mamba2" else self.value_dim

    @property
    def query_width(self) -> int:
        """Elements of a token that the host reads: inputs of convolution, decay and gain."""
        query, key, value, _ = self.token_shapes.sizes
        return query + key + value

    @property
    def output_width(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def cache_width(self) -> int:
        """Elements of a token in the KV cache: none."""
        return 0

    @property
    def prompt_width(self) -> int:
        return self.query_width + self.output_width

    @property
    def working_width(self) -> int:
        """Elements per token that a host holds, those of two float32 decays counted twice."""
        return 3 * self.conv_channels + 2 * self.output_width + 5 * self.decay_width

    def state_bytes(self, bytes_per_element: int) -> int:
        """Bytes that a sequence keeps: matrices, and inputs of the convolution."""
        matrices = self.num_heads * self.key_dim * self.value_dim
        past = (self.conv_width - 1) * self.conv_channels
        return STATE_BYTES[self.state_dtype] * matrices + bytes_per_element * past

    @property
    def token_flop(self) -> int:
        """Operations of a token on the state: decay, two products with it, and the update."""
        matrices = self.num_heads * self.key_dim * self.value_dim
        return 7 * matrices + 2 * self.conv_width * self.conv_channels

    @property
    def token_shapes(self) -> TokenShapes:
        query = (1, self.conv_channels)
        return TokenShapes(
            query=query,
            absorbed_query=query,
            key=(1, self.decay_width),
            value=(1, self.gain_width if self.has_matrices else 0),
            output=self.output_width,
            absorbed_output=self.output_width,
        )

    @property
    def has_gate(self) -> bool:
        return True

    @property
    def has_state(self) -> bool:
        return True

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        has_bias = self.has_bias
        for part, width in self.inputs.items():
            yield Weight(f"{RECURRENT}{part}_proj.weight", (width, hidden_size))
        for part, width in self.inputs.items() if has_bias else ():
            yield Weight(f"{RECURRENT}{part}_proj.bias", (width,))
        latent = self.latent_width
        if latent is None:
            gate = (self.gate_width, hidden_size)
            yield from linear(f"{RECURRENT}g_proj", gate, "post", has_bias=has_bias)
        else:
            yield Weight(f"{RECURRENT}g_a_proj.weight", (latent, hidden_size), "post")
            for part, width in self.latent_outputs.items():
                reader: Reader = "post" if part == "g_b" else "pre"
                yield Weight(f"{RECURRENT}{part}_proj.weight", (width, latent), reader)
        for part, width in self.projections.items():
            conv = (width, 1, self.conv_width)
            yield from linear(f"{RECURRENT}{part}_conv", conv, has_bias=self.has_conv_bias)
        if self.has_matrices:
            yield Weight(f"{RECURRENT}A_log", (self.num_heads,))
            yield Weight(f"{RECURRENT}dt_bias", (self.decay_width,))
            yield Weight(f"{RECURRENT}norm.weight", (self.norm_width,))
        if self.kind == "mamba2":
            yield Weight(f"{RECURRENT}D", (self.num_heads,))
        output = (hidden_size, self.output_width)
        yield from linear(f"{RECURRENT}o_proj", output, "post", has_bias=has_bias)

    def work(self, elements: ElementBytes) -> AttentionWork:
        return AttentionWork(
            query_width=self.query_width,
            output_width=self.output_width,
            token_sizes=self.token_shapes.sizes,
            state=StateWork(self.state_bytes(elements.activation), self.token_flop),
        )

    def with_state_dtype(self, dtype: str) -> Self:
        return replace(self, state_dtype=dtype)

    def describe(self) -> str:
        return (
            f"state ({self.kind}), {self.num_heads} heads of {self.key_dim} x {self.value_dim}, "
            f"convolution of {self.conv_width}"
        )
