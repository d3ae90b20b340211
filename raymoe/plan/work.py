"""Operations and bytes of each layer, for bounds and cost models.

Assumptions:
- Biases and norms are left out. A quantised matrix counts its stored bytes.
- Of several streams only the products with their matrices count, not the sums of streams.
- Latent attention decodes in the absorbed form: queries are projected into the latent space before
  attention and results out of it after, so attention reads only the cache. Prompts use the plain
  form, which has as many products with the same matrices.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod
from typing import NamedTuple, Self

from raymoe.errors import ConfigError
from raymoe.specs.attention.ngrams import TABLE_BYTES
from raymoe.specs.attention.work import AttentionShape, AttentionWork, ElementBytes
from raymoe.specs.layer_weights import (
    EMBEDDING,
    HEAD,
    attention_weights,
    common_weights,
    expert_weights,
)
from raymoe.specs.model import ModelSpec
from raymoe.specs.weights import Weight, num_elements
from raymoe.specs.workload import Workload


class Matrices(NamedTuple):
    parameters: int = 0
    num_bytes: int = 0

    def plus(self, other: "Matrices") -> "Matrices":
        return Matrices(self.parameters + other.parameters, self.num_bytes + other.num_bytes)

    def share(self, part: int, whole: int) -> "Matrices":
        return Matrices(self.parameters * part // whole, self.num_bytes * part // whole)


# How often a layer reads or writes all streams of its hidden state: before attention, between
# attention and the network, and after the network.
STREAM_VISITS = (2, 5, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    pre: Matrices
    post: Matrices  # projections after attention, also to a latent of experts; without the router
    router: Matrices  # empty in a dense layer
    expert: Matrices
    common: Matrices
    num_experts: int
    top_k: int
    expert_input: int  # elements that an expert reads and writes, of the hidden state or its latent
    expert_hidden: int  # outputs of an expert's first projections; 0 in a dense layer
    common_hidden: int  # those of the dense network or the shared expert
    # Matrices of which the factors of streams come, around attention and around the network. Those
    # of attention are computed for its input and again to add its result.
    mixers: Matrices
    attention: AttentionWork

    @classmethod
    def of(cls, model: ModelSpec, i: int, bytes_per_element: int, kv_element_bytes: int) -> Self:
        layer, hidden = model.layers[i], model.hidden_size

        def count(weights: Iterable[Weight]) -> Matrices:
            matrices = [weight for weight in weights if len(weight.shape) > 1]
            num_bytes = model.bytes_of(matrices, bytes_per_element, i)
            return Matrices(num_elements(matrices), num_bytes)

        parts: dict[str, Matrices] = defaultdict(Matrices)
        for weight in attention_weights(layer, hidden):
            both, before = count([weight]), weight.rows_before
            if before:  # the rest is for what `reader` says
                parts["pre"] = parts["pre"].plus(both.share(before, weight.shape[0]))
                both = both.share(weight.shape[0] - before, weight.shape[0])
            parts[weight.reader] = parts[weight.reader].plus(both)
        moe = layer.moe
        return cls(
            pre=parts["pre"],
            post=parts["post"],
            router=parts["router"],
            expert=count(expert_weights(moe, hidden)) if moe else Matrices(),
            common=count(common_weights(layer, hidden)),
            num_experts=moe.num_experts if moe else 0,
            top_k=moe.top_k if moe else 0,
            expert_input=moe.input_size(hidden) if moe else hidden,
            expert_hidden=moe.expert_hidden if moe else 0,
            common_hidden=layer.ffn.common_hidden,
            mixers=parts["mixers"],
            attention=layer.attention.work(ElementBytes(bytes_per_element, kv_element_bytes)),
        )

    @property
    def attention_parameters(self) -> int:
        return self.pre.parameters + self.post.parameters

    @property
    def router_parameters(self) -> int:
        return self.router.parameters

    @property
    def ffn_token_flop(self) -> int:
        """Feed-forward operations of one token without router and streams."""
        return 2 * (self.common.parameters + self.top_k * self.expert.parameters)

    def activated_experts(self, tokens: float) -> float:
        """Expected number of distinct experts that `tokens` independent tokens choose."""
        if not self.num_experts:
            return 0.0
        missed: float = (1.0 - self.top_k / self.num_experts) ** tokens
        return self.num_experts * (1.0 - missed)

    def weight_bytes(self, num_experts: float) -> float:
        always = self.pre.num_bytes + self.post.num_bytes + self.router.num_bytes
        always += self.mixers.num_bytes
        return always + self.common.num_bytes + num_experts * self.expert.num_bytes


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    layers: tuple[LayerWork, ...]
    hidden_size: int
    residual_size: int  # elements of a token's hidden state between blocks, all streams together
    stream_working_size: int  # elements of a token that mixing streams allocates
    ngram_width: int  # elements of the embeddings of n-grams of a token, of all tables
    table_bytes: int  # of tables of n-grams, which the host has
    ngram_bytes: int  # of a token, which the host reads of tables
    stream_factors: int  # float32 numbers that a block with several streams keeps for a token
    head: Matrices
    bytes_per_element: int
    num_ranks: int = 1  # ranks that all-reduce the hidden state twice per layer
    window: int | None = None  # tokens that layers with a window keep (`ModelSpec.cache_window`)
    has_latent_experts: bool = False

    @classmethod
    def of(
        cls, model: ModelSpec, bytes_per_element: int, *, kv_element_bytes: int | None = None
    ) -> Self:
        kv_bytes = kv_element_bytes or bytes_per_element
        shape, hidden, streams = model.head_shape, model.hidden_size, model.streams
        tables = [layer.ngrams for layer in model.layers if layer.ngrams is not None]
        head = EMBEDDING if model.tie_word_embeddings else HEAD
        return cls(
            layers=tuple(
                LayerWork.of(model, i, bytes_per_element, kv_bytes) for i in range(model.num_layers)
            ),
            hidden_size=hidden,
            residual_size=model.residual_size,
            stream_working_size=0 if streams is None else streams.working_width * hidden,
            ngram_width=sum(each.width for each in tables),
            table_bytes=model.table_bytes,
            ngram_bytes=sum(each.width * TABLE_BYTES[each.dtype] for each in tables),
            stream_factors=0 if streams is None else streams.num_factors,
            head=Matrices(prod(shape), model.bytes_of([Weight(head, shape)], bytes_per_element)),
            bytes_per_element=bytes_per_element,
            num_ranks=model.num_shards,
            window=model.cache_window,
            has_latent_experts=model.has_latent_experts,
        )

    @cached_property
    def expert_input(self) -> int:
        """Elements that experts read and write, of buffers that fit every layer with experts."""
        sizes = (layer.expert_input for layer in self.kinds if layer.num_experts)
        return max(sizes, default=self.hidden_size)

    @cached_property
    def kinds(self) -> tuple[LayerWork, ...]:
        return tuple(dict.fromkeys(self.layers))

    @property
    def token_flop(self) -> int:
        """Operations of one token in all layers, without attention scores and head."""
        return sum(
            2 * (layer.attention_parameters + layer.router_parameters)
            + 3 * layer.mixers.parameters  # three products with a half of them
            + layer.ffn_token_flop
            + layer.attention.token_flop
            for layer in self.layers
        )

    @property
    def head_flop(self) -> int:
        return 2 * self.head.parameters

    @property
    def pair_flop(self) -> int:
        """Operations per pair of a decoding token and a context token, all layers."""
        return sum(layer.attention.pair_flop for layer in self.layers)

    @property
    def prefill_pair_flop(self) -> int:
        return sum(layer.attention.prompt_pair_flop for layer in self.layers)

    @cached_property
    def around_attention_bytes(self) -> int:
        """Bytes per token of buffers around attention that fit every layer."""
        by_buffer = zip(*(layer.attention.token_sizes for layer in self.kinds), strict=True)
        elements: int = sum(max(sizes) for sizes in by_buffer)
        return self.bytes_per_element * elements

    @cached_property
    def kv_token_bytes(self) -> int:
        return sum(layer.attention.kv_token_bytes for layer in self.layers)

    @cached_property
    def windowed_token_bytes(self) -> int:
        """KV of a token in layers that keep no more than `window` of them."""
        if self.window is None:
            return 0
        return sum(
            layer.attention.kv_token_bytes
            for layer in self.layers
            if layer.attention.window is not None
        )

    @cached_property
    def state_bytes(self) -> int:
        """Bytes that a sequence of any length keeps in layers with states."""
        return sum(layer.attention.state_bytes for layer in self.layers)

    @cached_property
    def stages_states(self) -> bool:
        """Whether states of rows that attend on the device are copied there beside their KV."""
        return any(layer.attention.recent is not None for layer in self.layers)

    @cached_property
    def updated_bytes(self) -> int:
        """Bytes of a sequence's states that a decoding token reads and writes."""
        return sum(layer.attention.updated_bytes for layer in self.layers)

    @property
    def all_weight_bytes(self) -> float:
        layers = sum(layer.weight_bytes(layer.num_experts) for layer in self.layers)
        return layers + self.head.num_bytes

    def activated_weight_bytes(self, tokens: float) -> float:
        layers = sum(layer.weight_bytes(layer.activated_experts(tokens)) for layer in self.layers)
        return layers + self.head.num_bytes

    def row_bytes(self, width: int) -> int:
        return self.bytes_per_element * width

    def embedding_bytes(self, tokens: float) -> float:
        """Bytes of embeddings, and of what comes from tables of n-grams; read and written."""
        width = 2 * self.row_bytes(self.residual_size) + self.row_bytes(self.ngram_width)
        return tokens * width + tokens * self.ngram_bytes

    def before_attention_bytes(self, layer: LayerWork, tokens: float) -> float:
        """Bytes that norm and rotation read and write."""
        return tokens * self.row_bytes(
            2 * (self.hidden_size + layer.pre.parameters // self.hidden_size)
        )

    def after_attention_bytes(self, tokens: float) -> float:
        """Bytes that residual and norm read and write."""
        return tokens * self.row_bytes(4 * self.hidden_size)

    def after_ffn_bytes(self, tokens: float) -> float:
        """Bytes read and written to add what the network returns."""
        return tokens * self.row_bytes(3 * self.hidden_size)

    def logit_bytes(self, rows: float) -> float:
        return rows * self.row_bytes(self.head.parameters // self.hidden_size)

    def mixing_bytes(self, tokens: float, visits: int) -> float:
        """Bytes of all streams of the hidden state, read or written so many times."""
        return visits * tokens * self.row_bytes(self.residual_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchShape:
    """Tokens of a micro-batch, by the side that attends; all on the host where it has no device."""

    host: AttentionShape = field(default_factory=AttentionShape)
    device: AttentionShape = field(default_factory=AttentionShape)
    logit_rows: float = 0.0  # tokens whose logits are computed

    def __post_init__(self) -> None:
        if self.logit_rows < 0:
            raise ConfigError(
                f"MicroBatchShape.logit_rows is {self.logit_rows!r}; it must not be negative"
            )

    @classmethod
    def decode(cls, rows: float, context: float, cpu_attention_fraction: float = 1.0) -> Self:
        """One token per row, part of `context`; the fraction is omega of MoE-Gen, equation 1."""
        if not 0.0 <= cpu_attention_fraction <= 1.0:
            raise ConfigError(
                f"cpu_attention_fraction is {cpu_attention_fraction!r}; it must be between 0 and 1"
            )
        host_rows = cpu_attention_fraction * rows
        return cls(
            host=_decoding(host_rows, context),
            device=_decoding(rows - host_rows, context),
            logit_rows=rows,
        )

    @classmethod
    def prefill(cls, rows: float, prompt: float, *, is_on_host: bool = False) -> "MicroBatchShape":
        """The whole prompt of `rows` sequences, attended to on the device or the host."""
        return _prompts(rows * prompt, prompt, 1.0, is_on_host=is_on_host)

    @property
    def tokens(self) -> float:
        return self.host.rows + self.device.rows

    def __add__(self, other: "MicroBatchShape") -> "MicroBatchShape":
        return MicroBatchShape(
            host=self.host + other.host,
            device=self.device + other.device,
            logit_rows=self.logit_rows + other.logit_rows,
        )


def _decoding(rows: float, context: float) -> AttentionShape:
    pairs = rows * context
    return AttentionShape(rows=rows, decode_rows=rows, pairs=pairs, context_tokens=pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Tokens of a step; means may be fractions."""

    decode_rows: float = 0.0  # sequences that decode a token
    decode_context: float = 0.0  # tokens of each decoding sequence, the new one included
    prompt_tokens: float = 0.0
    prompt_chunk: float = 1.0  # prompt tokens of one sequence in the step
    # What prompt tokens attend to: half of their chunk, and all before it. Twice the mean of that
    # over the prompt tokens, as a multiple of the mean chunk of the sequences.
    prompt_spread: float = 1.0

    @classmethod
    def of_prompts(cls, workload: Workload, prompt_tokens: int, max_chunk_tokens: int) -> Self:
        """A step of nothing but prompts of mean length."""
        chunk = min(workload.computed_prompt_tokens, max_chunk_tokens)
        return cls(
            prompt_tokens=prompt_tokens,
            prompt_chunk=chunk,
            prompt_spread=1 + 2 * workload.shared_prompt_tokens / chunk,
        )

    @property
    def tokens(self) -> float:
        return self.decode_rows + self.prompt_tokens

    def micro_batches(
        self,
        num_micro_batches: int,
        cpu_attention_fraction: float,
        *,
        has_prompts_on_host: bool = False,
    ) -> tuple[MicroBatchShape, ...]:
        """Divide the step: chunks of prompts in turn, and decoding rows evenly.

        Filling up micro-batches with fewer prompts (MoE-Lightning, algorithm 2) would put most
        decoding rows into one of them, and no other would overlap with their attention.
        """
        chunks = _deal_chunks(self.prompt_tokens, self.prompt_chunk, num_micro_batches)
        deals = [(self.decode_rows / num_micro_batches, chunk) for chunk in chunks]
        shapes = {
            deal: MicroBatchShape.decode(deal[0], self.decode_context, cpu_attention_fraction)
            + _prompts(
                deal[1], self.prompt_chunk, self.prompt_spread, is_on_host=has_prompts_on_host
            )
            for deal in set(deals)
        }
        return tuple(shapes[deal] for deal in deals)  # equal micro-batches are one object


class Repeated(NamedTuple):
    """A load and the number of steps with it, which may be a fraction."""

    load: StepLoad
    number: float


# Cells per dimension of the load, up to the largest. With 3, a job takes 8 simulated steps and
# differs from one with all steps simulated by 0.1 % in the mean over random jobs, 3 % at most.
CELLS = 3


def duplicates(steps: Sequence[Repeated]) -> list[Repeated]:
    """Merge steps with similar loads into one mean load each."""
    maximum = StepLoad(
        decode_rows=max(load.decode_rows for load, _ in steps),
        decode_context=max(load.decode_context for load, _ in steps),
        prompt_tokens=max(load.prompt_tokens for load, _ in steps),
    )
    cells: dict[tuple[int, int, int], _Sum] = {}
    for load, count in steps:
        cell = (
            _cell(load.decode_rows, maximum.decode_rows),
            _cell(load.decode_context, maximum.decode_context),
            _cell(load.prompt_tokens, maximum.prompt_tokens),
        )
        cells.setdefault(cell, _Sum()).add(load, count)
    return [total.mean() for total in cells.values()]


def _cell(value: float, maximum: float) -> int:
    return ceil(CELLS * value / maximum) if value else 0


@dataclass(slots=True)
class _Sum:
    count: float = 0.0
    rows: float = 0.0
    pairs: float = 0.0
    prompt_tokens: float = 0.0
    chunks: float = 0.0
    prompt_pairs: float = 0.0  # of a prompt token and those of its chunk

    def add(self, load: StepLoad, count: float) -> None:
        rows = count * load.decode_rows
        self.count += count
        self.rows += rows
        self.pairs += rows * load.decode_context
        self.prompt_tokens += count * load.prompt_tokens
        self.chunks += count * load.prompt_tokens / load.prompt_chunk
        seen = load.prompt_spread * load.prompt_chunk
        self.prompt_pairs += count * load.prompt_tokens * seen

    def mean(self) -> Repeated:
        chunk = self.prompt_tokens / self.chunks if self.chunks else 1.0
        load = StepLoad(
            decode_rows=self.rows / self.count,
            decode_context=self.pairs / self.rows if self.rows else 0.0,
            prompt_tokens=self.prompt_tokens / self.count,
            prompt_chunk=chunk,
            prompt_spread=self.prompt_pairs / self.prompt_tokens / chunk if self.chunks else 1.0,
        )
        return Repeated(load, self.count)


def _deal_chunks(tokens: float, chunk: float, num_micro_batches: int) -> list[float]:
    if tokens <= 0:
        return [0.0] * num_micro_batches
    num_chunks = max(1, ceil(tokens / chunk))
    mean = tokens / num_chunks
    counts = [
        num_chunks // num_micro_batches + (micro_batch < num_chunks % num_micro_batches)
        for micro_batch in range(num_micro_batches)
    ]
    return [mean * count for count in counts]


def _prompts(tokens: float, chunk: float, spread: float, *, is_on_host: bool) -> MicroBatchShape:
    chunk = min(chunk, tokens) or 1.0
    pairs = tokens * (spread * chunk + 1) / 2
    shape = AttentionShape(rows=tokens, prompt_pairs=pairs, context_tokens=tokens)
    if is_on_host:
        return MicroBatchShape(host=shape, logit_rows=tokens / chunk)
    return MicroBatchShape(device=shape, logit_rows=tokens / chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One computation and the bytes it reads per level (MoE-Lightning, definition 3.1)."""

    name: str
    flop: float
    near_bytes: float  # read from device memory if the operation runs there
    far_bytes: float

    @property
    def near_intensity(self) -> float:
        return self.flop / self.near_bytes

    @property
    def far_intensity(self) -> float:
        return self.flop / self.far_bytes if self.far_bytes else math.inf
