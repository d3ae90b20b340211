"""CPU kernels of attention to the last tokens and to entries that pool earlier ones (DeepSeek-V4).

T tokens, W width of a row and of an entry, H heads, K chosen entries, R rows of a slot.
"""

from torch import Tensor

from raymoe import _native
from raymoe.errors import ConfigError
from raymoe.kernels.compressed import CompressedScoring, Pooling
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.paged_kv import CompressedLayout


def append_and_attend_compressed_on_host(  # noqa: PLR0913, PLR0917 - an operator: its tensors are its arguments
    query_THW: Tensor,
    row_TW: Tensor,
    pooled_TX: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    layout: CompressedLayout,
    tables: tuple[Tensor, Tensor],
    scoring: CompressedScoring,
    chosen_TK: Tensor | None = None,
) -> Tensor:
    """Compute what `compressed.append_and_attend_compressed` does, without its roundings between.

    A token's bits depend only on its position, what it chose and its sequence: not on the batch,
    nor on the steps that its sequence was cut into, nor on the number of threads.

    Raises:
        ConfigError: A shape, type or entry of the batch does not fit; names the argument.
    """
    if scoring.pooling is not None:
        entries_NEW, _, sums_MA3W = layout.views(cache)
        pool_entries(
            pooled_TX, (entries_NEW, sums_MA3W), batch,
            ratio=layout.ratio, tables=tables, pooling=scoring.pooling,
        )  # fmt: skip
    return append_and_attend_rows(
        query_THW,
        row_TW,
        cache,
        batch,
        layout=layout,
        tables=tables,
        scoring=scoring,
        chosen_TK=chosen_TK,
    )


def pool_entries(
    pooled_TX: Tensor,
    entries_and_sums: tuple[Tensor, Tensor],
    batch: AttentionBatch,
    *,
    ratio: int | None,
    tables: tuple[Tensor, Tensor],
    pooling: Pooling,
) -> None:
    """Add the step's tokens to the sums of their slots, and the entries of whole windows to blocks.

    Tokens are added in float32 one after the other, so that an entry does not depend on the steps
    that its window was cut into. An entry has a norm, is rotated by the first position of its
    window and rounded once.
    """
    entries_NEW, sums_MA3W = entries_and_sums
    assert ratio is not None, "layers without entries pool nothing"
    try:
        _native.pool_entries(
            pooled_TX,
            pooling.bias_MX,
            pooling.norm_W,
            pooling.eps,
            sums_MA3W,
            entries_NEW,
            batch.query_start,
            batch.context_tokens,
            batch.block_table,
            _slots(batch),
            *tables,
            ratio,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def append_and_attend_rows(
    query_THW: Tensor,
    row_TW: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    layout: CompressedLayout,
    tables: tuple[Tensor, Tensor],
    scoring: CompressedScoring,
    chosen_TK: Tensor | None = None,
) -> Tensor:
    """Attend to rows and to the entries in blocks, and keep the last rows; [T, H, W], rotated back.

    Args:
        chosen_TK: int32, the entries that each token attends to in ascending order, then -1; all
            are of windows that ended. None: all of these.
    """
    entries_NEW, rows_MRW, _ = layout.views(cache)
    out_THW = query_THW.new_empty(query_THW.shape)
    try:
        _native.append_and_attend_compressed(
            query_THW,
            row_TW.to(rows_MRW.dtype),
            scoring.sinks_H,
            chosen_TK,
            scoring.scale,
            rows_MRW,
            entries_NEW,
            batch.query_start,
            batch.context_tokens,
            batch.block_table,
            _slots(batch),
            *tables,
            layout.ratio or 0,
            out_THW,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return out_THW


def _slots(batch: AttentionBatch) -> Tensor:
    if batch.slots is None:
        raise ConfigError("slots is None; this attention needs the slot of each sequence")
    return batch.slots
