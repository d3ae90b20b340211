"""Types of the compiled module; every function is wrapped and documented in raymoe.kernels."""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

Args = ParamSpec("Args")
Result = TypeVar("Result")

def compiled(function: Callable[Args, Result]) -> Callable[Args, Result]: ...

BLOCK_TOKENS: int
VALUE_COLUMNS: int
HEAD_DIM_MULTIPLE: int
MAX_HEAD_DIM: int
MAX_EXPERTS: int
PANEL_COLUMNS: int
PACKED_ALIGNMENT: int
INT4_ZERO: int
MAX_INPUT_RUN: int

def active_isa() -> str: ...
def supported_isas() -> list[str]: ...
def set_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(num_threads: int) -> None: ...
def rms_norm(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float | None,
    out: Tensor,
) -> None: ...
def qkv_rope(
    qkv: Tensor,
    positions: Tensor,
    cosine: Tensor,
    sine: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    eps: float,
    clip: float,
    norm_follows: bool,
    interleaved: bool,
    norms_values: bool,
    values_are_keys: bool,
    offset: float | None,
) -> None: ...
def route(logits: Tensor, renormalize: bool, ids: Tensor, weights: Tensor) -> None: ...
def add_gated(out: Tensor, shared: Tensor, gate: Tensor) -> None: ...
def rotate_ends(
    rows: Tensor, positions: Tensor, cosine: Tensor, sine: Tensor, backwards: bool, out: Tensor
) -> None: ...

MAX_GROUP_WIDTH: int

def gate_values(values: Tensor, gates: Tensor, activation: str, out: Tensor) -> None: ...
def norm_and_gate(
    values: Tensor,
    weight: Tensor,
    gates: Tensor,
    eps: float,
    rounds_norm: bool,
    activation: str,
    out: Tensor,
) -> None: ...
def gate_and_norm(
    values: Tensor, weight: Tensor, gates: Tensor, num_groups: int, eps: float, out: Tensor
) -> None: ...

MAX_STREAMS: int

def stream_logits(
    hidden: Tensor, logits: Tensor, scale: Tensor, base: Tensor, eps: float
) -> None: ...
def read_streams(hidden: Tensor, logits: Tensor, eps: float, out: Tensor) -> None: ...
def read_gated_streams(normed: Tensor, gates: Tensor, out: Tensor) -> None: ...
def mixing_matrices(logits: Tensor, iterations: int, eps: float, out: Tensor) -> None: ...
def add_to_streams(
    hidden: Tensor,
    delta: Tensor,
    logits: Tensor,
    matrices: Tensor | None,
    magnitude: float,
    eps: float,
) -> None: ...
def packed_bytes(out_features: int, in_features: int) -> int: ...
def packed_gate_up_bytes(expert_size: int, hidden_size: int) -> int: ...
def pack_linear(weight: Tensor, packed: Tensor) -> None: ...
def pack_gate_up(gate: Tensor, up: Tensor, packed: Tensor) -> None: ...

class CodeFormat:
    def __init__(
        self,
        kind: str,
        group_size: int,
        shares_scales: bool,
        has_zeros: bool,
        has_order: bool,
    ) -> None: ...
    @property
    def is_decoded(self) -> bool: ...
    def packed_bytes(self, out_features: int, in_features: int) -> int: ...
    def packed_gate_up_bytes(self, expert_size: int, hidden_size: int) -> int: ...

_Codes = tuple[Tensor, Tensor, int, Tensor | None, Tensor | None, float, float]

def pack_codes(code_format: CodeFormat, weight: _Codes, packed: Tensor) -> None: ...
def pack_gate_up_codes(
    code_format: CodeFormat, gate: _Codes, up: _Codes, packed: Tensor
) -> None: ...
def packed_linear(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    out: Tensor,
    code_format: CodeFormat | None = None,
) -> None: ...
def quantise_rows(x: Tensor, run: int, codes: Tensor, scales: Tensor) -> None: ...
def packed_grouped_linear(x: Tensor, packed: Tensor, out: Tensor) -> None: ...
def fused_experts(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    expert_size: int,
    gain: float,
    cubic: float,
    limit: float,
    offset: float,
    gate_limit: float,
    out: Tensor,
    gate_up_format: CodeFormat | None = None,
    down_format: CodeFormat | None = None,
) -> None: ...
def add_row_experts(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    matrices: Tensor,
    expert_size: int,
    first: int,
    last: int,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    gain: float,
    cubic: float,
    limit: float,
    offset: float,
    gate_limit: float,
    sums: Tensor,
) -> None: ...
def gated_ffn(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_size: int,
    gain: float,
    cubic: float,
    out: Tensor,
    gate_up_format: CodeFormat | None = None,
    down_format: CodeFormat | None = None,
) -> None: ...
def append_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    block_table: Tensor,
    out: Tensor,
    scale: float,
    sliding_window: int,
    sinks: Tensor | None,
) -> None: ...
def append(
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    block_table: Tensor,
) -> None: ...
def append_and_attend_latent(
    query: Tensor,
    latent: Tensor,
    cache: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    block_table: Tensor,
    out: Tensor,
    scale: float,
    sinks: Tensor | None,
) -> None: ...
def append_latent(
    latent: Tensor,
    cache: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    block_table: Tensor,
) -> None: ...
def choose_positions(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    block_table: Tensor,
    entry_tokens: int,
    out: Tensor,
) -> None: ...
def pool_entries(
    pooled: Tensor,
    bias: Tensor,
    norm: Tensor,
    eps: float,
    sums: Tensor,
    entries: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    block_table: Tensor,
    slots: Tensor,
    cosine: Tensor,
    sine: Tensor,
    ratio: int,
) -> None: ...
def append_and_attend_compressed(
    query: Tensor,
    new_rows: Tensor,
    sinks: Tensor,
    chosen: Tensor | None,
    scale: float,
    rows: Tensor,
    entries: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    block_table: Tensor,
    slots: Tensor,
    cosine: Tensor,
    sine: Tensor,
    ratio: int,
    out: Tensor,
) -> None: ...
def choose_blocks(
    query: Tensor,
    keys: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    block_table: Tensor,
    block_tokens: int,
    num_local: int,
    out: Tensor,
) -> None: ...
def causal_conv(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    slots: Tensor,
    silu: bool,
    out: Tensor,
) -> None: ...
def scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    gain: Tensor,
    states: Tensor,
    query_start: Tensor,
    context_tokens: Tensor,
    slots: Tensor,
    scale: float,
    delta: bool,
    normalize: bool,
    out: Tensor,
) -> None: ...
def argmax(logits: Tensor, ids: Tensor) -> None: ...
def gumbel_argmax(
    logits: Tensor,
    scale: Tensor | None,
    seed: Tensor,
    row_key: Tensor,
    sample: Tensor,
    position: Tensor,
    ids: Tensor,
) -> None: ...
def log_sum_exp(logits: Tensor, out: Tensor) -> None: ...
def top_k(logits: Tensor, ids: Tensor, values: Tensor) -> None: ...
def read_bandwidth_bytes_per_s(num_threads: int, seconds: float, num_bytes: int) -> float: ...
def update_bandwidth_bytes_per_s(num_threads: int, seconds: float, num_bytes: int) -> float: ...
def peak_flop_per_s(num_threads: int, seconds: float, dtype: str) -> float: ...

class CancelToken:
    def __init__(self) -> None: ...
    def cancel(self) -> None: ...
    @property
    def is_cancelled(self) -> bool: ...

class Mark:
    def __init__(self) -> None: ...
    def wait_done(self) -> bool: ...
    @property
    def is_done(self) -> bool: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def native_error(self) -> str: ...
    def finish(self, start_s: float, end_s: float) -> None: ...
    def cancel_native(self, error: str) -> None: ...

class DeviceRuntime:
    def begin(self, stream: int, after: Sequence[object], mark: Mark) -> bool: ...
    def end(self, stream: int, mark: Mark) -> None: ...
    def close(self) -> None: ...

class SimulatedLink(DeviceRuntime):
    def __init__(self, bytes_per_s: float, copies: bool) -> None: ...
    def new_stream(self, to_device: bool) -> int: ...

def cuda_runtime(
    functions: dict[str, int], device: int, version: int, clock_stream: int, anchor_s: float
) -> DeviceRuntime: ...

class LinkMeter:
    def __init__(self) -> None: ...
    def read(self) -> tuple[int, float]: ...

class Mover:
    def __init__(
        self,
        name: str,
        runtime: DeviceRuntime,
        stream: int,
        *,
        to_device: bool,
        packet_bytes: int,
        chunk_bytes: int,
        meter: LinkMeter,
    ) -> None: ...
    def submit(
        self,
        rows: Sequence[tuple[int, int, int]] | npt.NDArray[np.int64],
        can_batch: bool,
        after: Sequence[object],
        mark: Mark,
        seconds: float,
        stall_s: float,
        on_done: Callable[[], None] | None,
        token: CancelToken | None,
    ) -> None: ...
    def count_arrived(self) -> None: ...
    def close(self) -> None: ...
