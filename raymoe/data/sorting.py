"""Sorting of rows: those that share a prefix together, expensive ones first.

The engine computes a shared prefix once if its rows come close together. Ray Data sorts the rows;
each sorted part is then packed into blocks of about the same cost. The last blocks of a part are
its cheapest, so that little work is left when most of the pool is empty.
"""

import functools
import hashlib
import heapq
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymoe.data.rows import BadCell, read_cells
from raymoe.errors import ConfigError

if TYPE_CHECKING:
    from ray.data import Dataset

PREFIX_BYTES = 2048
ROWS_PER_BLOCK = 16  # a call, unless an actor has very many rows in flight
MIN_SHARED_BYTES = 64  # the engine shares blocks of 32 tokens, which rarely have fewer bytes
PREFIX, MIX, SIZE = "__raymoe_prefix__", "__raymoe_mix__", "__raymoe_size__"
KEYS = (PREFIX, MIX, SIZE)
_INDEX_BITS = 20

Int64s = npt.NDArray[np.int64]


def sort_by_prefix(
    dataset: "Dataset",
    *,
    prompt_column: str = "prompt",
    messages_column: str = "messages",
    tools_column: str | None = None,
    prefix_bytes: int = PREFIX_BYTES,
    rows_per_block: int = ROWS_PER_BLOCK,
) -> "Dataset":
    """Return the same rows, with all their columns, in an order that is cheaper to generate.

    Rows whose prompts begin the same become neighbours, so that the engine computes what they share
    once. Rows that share nothing are distributed by length, so that blocks cost about the same.

    This sorts: no row comes out before all were read, the rows go through Ray's object store (and
    its spill directory) once, and their order is lost. Neither this process nor any task holds more
    than a part of them. Ray's checkpoints need maps between read and write and do not work with it;
    journals do (`MoEGenerator`, ``journal_dir``).

    Examples:
        >>> ds = ray.data.from_items([{"prompt": text} for text in ("b: 1", "a: 1", "b: 2")])
        >>> raymoe.sort_by_prefix(ds).count()
        3

    Args:
        dataset: Rows of any block format.
        prompt_column: As for `MoEGenerator`, like the next two.
        tools_column: What the messages may call; chat templates put it first.
        prefix_bytes: Length of the prefix by which rows are compared; each row needs that much more
            memory while it is sorted. Rows that agree in all of it come in any order.
        rows_per_block: Rows of all output blocks but one: `batch_size` of `map_batches_kwargs`.

    Raises:
        ConfigError: An invalid number, or a dataset with neither column.
    """
    for name, value in (("prefix_bytes", prefix_bytes), ("rows_per_block", rows_per_block)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1")
    columns = (tools_column, messages_column, prompt_column)
    parts = sort_and_deal(dataset, columns, prefix_bytes, rows_per_block)
    return parts.repartition(target_num_rows_per_block=rows_per_block, strict=True)


def sort_and_deal(
    dataset: "Dataset",
    columns: tuple[str | None, str, str],
    prefix_bytes: int,
    rows_per_block: int,
) -> "Dataset":
    """Return the sorted and packed parts, not cut; columns are tools, messages and prompt."""
    add_keys = functools.partial(_add_keys, columns=columns, num_bytes=prefix_bytes)
    deal = functools.partial(_deal, rows_per_block=rows_per_block)
    keyed = dataset.map_batches(add_keys, batch_size=None, batch_format="pyarrow")
    parts = keyed.sort([PREFIX, MIX])
    return parts.map_batches(deal, batch_size=None, batch_format="pyarrow")


def prompt_bytes(tools: object, messages: object, prompt: object) -> bytes:
    """Return bytes whose common prefix grows with that of the tokens of two rows.

    Accepts any cell: rows that cannot be generated are sorted too.
    """
    return b"\0".join(_bytes_of(cell) for cell in (tools, messages, prompt) if cell is not None)


def _bytes_of(cell: Any) -> bytes:
    if isinstance(cell, bytes):
        return cell
    if isinstance(cell, str):
        return cell.encode("utf-8", "surrogatepass")
    if isinstance(cell, list) and all(type(token) is int and 0 <= token < 2**32 for token in cell):
        return struct.pack(f">{len(cell)}I", *cell)
    if isinstance(cell, list) and all(isinstance(entry, dict) for entry in cell):
        return b"\0".join(_message_bytes(entry) for entry in cell)
    return repr(cell).encode("utf-8", "surrogatepass")


def _message_bytes(message: dict[str, Any]) -> bytes:
    known = {name: message.get(name) for name in ("role", "content")}
    rest = {name: value for name, value in message.items() if name not in known and value}
    parts = [*known.values(), *([rest] if rest else [])]
    texts = [part if isinstance(part, str) else json.dumps(part, default=repr) for part in parts]
    return "\n".join(texts).encode("utf-8", "surrogatepass")


def _add_keys(table: pa.Table, *, columns: tuple[str | None, str, str], num_bytes: int) -> pa.Table:
    if table.num_rows and not set(columns[1:]) & set(table.column_names):
        have = ", ".join(map(repr, table.column_names)) or "no columns"
        raise ConfigError(
            f"sort by prefix: neither column {columns[2]!r} nor {columns[1]!r} exists; the rows "
            f"have {have}; set prompt_column or messages_column"
        )
    clash = sorted(set(KEYS) & set(table.column_names))
    if clash:
        raise ConfigError(
            f"sort by prefix: the rows already have the column {clash[0]!r}; rename it"
        )
    cells = zip(*(map(_readable, read_cells(table, name)) for name in columns), strict=True)
    texts = [prompt_bytes(*row) for row in cells]
    keys = (
        pa.array([text[:num_bytes] for text in texts], pa.large_binary()),
        pa.array([_mix(text[num_bytes:], i) for i, text in enumerate(texts)], pa.int64()),
        pa.array([len(text) for text in texts], pa.int64()),
    )
    for name, key in zip(KEYS, keys, strict=True):
        table = table.append_column(name, key)
    return table


def _readable(cell: object) -> object:
    return cell.reason if isinstance(cell, BadCell) else cell


def _mix(rest: bytes, index: int) -> int:
    """Return a number that spreads equal prefixes evenly over the parts of a sort.

    It depends only on the row and its index in a block, so that a task that Ray reruns sends each
    row to the same part.
    """
    digest = hashlib.blake2b(rest, digest_size=8).digest()
    high = int.from_bytes(digest, "little") >> (_INDEX_BITS + 1)
    return (high << _INDEX_BITS) | index % (1 << _INDEX_BITS)


@dataclass(frozen=True, slots=True)
class _Family:
    """Rows `begin` to `end` of a sorted part, which share a prefix.

    Attributes:
        cost: Bytes that no earlier row shares.
    """

    begin: int
    end: int
    cost: int

    @property
    def num_rows(self) -> int:
        return self.end - self.begin


def _deal(table: pa.Table, *, rows_per_block: int) -> pa.Table:
    prefixes = table.column(PREFIX).to_pylist()
    sizes = table.column(SIZE).to_numpy()
    order = deal_rows(prefixes, sizes, rows_per_block)
    return table.drop_columns(list(KEYS)).take(pa.array(order, pa.int64()))


def deal_rows(
    prefixes: Sequence[bytes], sizes: Sequence[int] | Int64s, rows_per_block: int
) -> list[int]:
    """Return the order in which sorted rows are packed.

    Args:
        sizes: Bytes of each row's whole prompt.
        rows_per_block: Rows of a block; larger families fill blocks of their own.
    """
    if not prefixes:
        return []
    common = shared_bytes(prefixes[0], prefixes[-1])  # shared by all rows
    shared = np.array([common, *itertools.starmap(shared_bytes, itertools.pairwise(prefixes))])
    families = list(_families(shared - common, np.asarray(sizes, np.int64) - shared))
    large = [[family] for family in families if family.num_rows >= rows_per_block]
    small = [family for family in families if family.num_rows < rows_per_block]
    units = [*large, *_pack(small, rows_per_block)]
    units.sort(key=lambda unit: -_cost_per_row(unit))
    return [row for unit in units for family in unit for row in range(family.begin, family.end)]


def shared_bytes(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    first = np.frombuffer(one, np.uint8, length) != np.frombuffer(other, np.uint8, length)
    return int(first.argmax())


def _families(shared: Int64s, costs: Int64s) -> Iterator[_Family]:
    starts = np.flatnonzero(shared < MIN_SHARED_BYTES)  # the first row of each family
    for begin, end in itertools.pairwise([*starts.tolist(), len(costs)]):
        yield _Family(begin, end, int(costs[begin:end].sum()))


def _pack(families: Iterable[_Family], rows_per_block: int) -> list[list[_Family]]:
    """Pack families into blocks of equal cost: the most expensive first, into the cheapest block.

    Source: R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969), with a limit of rows
    per block.
    """
    families = sorted(families, key=lambda family: (-family.cost, family.begin))
    num_rows = sum(family.num_rows for family in families)
    blocks: list[list[_Family]] = [[] for _ in range(-(-num_rows // rows_per_block))]
    free = [rows_per_block] * len(blocks)
    cheapest = [(0, index) for index in range(len(blocks))]
    for family in families:
        too_full = []
        while cheapest and free[cheapest[0][1]] < family.num_rows:
            too_full.append(heapq.heappop(cheapest))
        if not cheapest:
            blocks.append([])
            free.append(rows_per_block)
            cheapest.append((0, len(blocks) - 1))
        cost, index = heapq.heappop(cheapest)
        blocks[index].append(family)
        free[index] -= family.num_rows
        for entry in (*too_full, (cost + family.cost, index)):
            if free[entry[1]]:
                heapq.heappush(cheapest, entry)
    return blocks


def _cost_per_row(unit: Sequence[_Family]) -> float:
    return sum(family.cost for family in unit) / sum(family.num_rows for family in unit)
