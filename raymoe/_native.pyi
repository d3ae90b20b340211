"""Types of the compiled module; every function is wrapped and documented in raymoe.kernels."""

from torch import Tensor

def active_isa() -> str: ...
def supported_isas() -> list[str]: ...
def set_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(num_threads: int) -> None: ...
def rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float, out: Tensor
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
) -> None: ...
def route(logits: Tensor, renormalize: bool, ids: Tensor, weights: Tensor) -> None: ...
def add_gated(out: Tensor, shared: Tensor, gate: Tensor) -> None: ...
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
) -> None: ...
