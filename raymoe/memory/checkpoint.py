"""Safetensors checkpoints from untrusted sources: names, headers and offsets are checked.

The format (safetensors 0.8): 8 bytes little-endian header length, a JSON header of tensor name ->
dtype, shape, data_offsets, then the data, without holes or overlaps.
"""

import itertools
import math
import mmap
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from raymoe.codecs import TORCH_DTYPES
from raymoe.errors import CheckpointError
from raymoe.specs.files import (
    INDEX_FILE,
    SINGLE_FILE,
    open_regular,
    parse_json_object,
    read_json_object,
    resolve_inside,
)
from raymoe.specs.other_formats import POINTER, is_pointer, other_format, pointer_problem
from raymoe.specs.weight_format import ITEM_BYTES
from raymoe.units import MIB, format_bytes

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_INDEX_BYTES = 64 * MIB
MAX_TENSORS = 1 << 19  # more than twice that of any published model, with 4 per matrix
MAX_ENTRY_BYTES = 512  # maximum per tensor in a header or an index
_OTHER_BYTES = MIB  # maximum for the rest of a header
_OTHER_OBJECTS = 1000  # metadata may hold JSON as text
MAX_DIMENSIONS = 64  # limit of torch
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint.

    Attributes:
        dtype: Name in the format, such as "BF16".
        offset: First byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Checkpoint:
    """The tensors of one model directory, memory-mapped read-only.

    Attributes:
        unindexed: Tensors of its files that the index does not name.

    Opening checks everything and reads no tensor data. The files must not change while they are
    mapped: reading a page that no longer exists ends the process (SIGBUS), so `tensor` checks the
    file size first.
    """

    def __init__(
        self,
        directory: Path,
        files: Mapping[str, Path],
        max_tensors: int = MAX_TENSORS,
        weight_map: Mapping[str, str] | None = None,
    ) -> None:
        """Open `files`; of a tensor in two of them the one counts that `weight_map` names."""
        self.directory = directory
        weight_map = weight_map or {}
        self._entries: dict[str, Entry] = {}
        self._maps: dict[str, tuple[mmap.mmap, Tensor]] = {}
        self.unindexed: frozenset[str] = frozenset()
        for file, path in files.items():
            room = max_tensors - len(self._entries)
            mapping, header = _open_file(path, file=file, max_tensors=room)
            for name, entry in header.items():
                if weight_map.get(name, file) != file:
                    continue  # another file has the one that counts
                if name in self._entries:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is also in {self._entries[name].file}"
                    )
                self._entries[name] = entry
            self._maps[file] = (mapping, _as_bytes(mapping))

    @classmethod
    def open(cls, directory: Path, max_tensors: int = MAX_TENSORS) -> Self:
        """Resolve, map and check the checkpoint of a model directory.

        Args:
            max_tensors: Upper bound of the tensors for this model; larger checkpoints are refused.

        Raises:
            CheckpointError: Missing, damaged, truncated, unsafe or pickled; names the file and, if
                there is one, the tensor.
        """
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: not a directory")
        present = {path.name for path in directory.iterdir()}
        if SINGLE_FILE in present:
            file = resolve_inside(directory, SINGLE_FILE)
            return cls(directory, {SINGLE_FILE: file}, max_tensors)
        if INDEX_FILE not in present:
            raise CheckpointError(_explain_missing(directory, present))
        weight_map = _read_weight_map(directory, max_tensors)
        names = sorted(set(weight_map.values()))
        files = {name: resolve_inside(directory, name) for name in names}
        checkpoint = cls(directory, files, max_tensors, weight_map)
        checkpoint._check_against_index(weight_map)
        return checkpoint

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"{self.directory}: no tensor {name!r}") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def files(self) -> dict[str, str]:
        return {name: entry.file for name, entry in self._entries.items()}

    def tensor(self, name: str) -> Tensor:
        """Return a view of the mapped file, which must not be written to (that ends the process).

        A tensor whose data is not aligned to its element size is copied.
        """
        entry = self.entry(name)
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(
                f"{self.directory / entry.file}: tensor {name!r} has type {entry.dtype}; "
                f"supported: {', '.join(TORCH_DTYPES)}"
            )
        mapping, file = self._maps[entry.file]
        end = entry.offset + entry.num_bytes
        size = mapping.size()  # current size of the file
        if size < end:
            raise CheckpointError(
                f"{self.directory / entry.file}: became shorter while it was in use: tensor "
                f"{name!r} ends at byte {end}, the file has {size} of {len(mapping)} bytes; "
                "download the file again, and replace files by renaming"
            )
        data = file[entry.offset : end]
        if data.data_ptr() % ITEM_BYTES[entry.dtype]:
            data = data.clone()
        return data.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)

    def drop_pages(self, names: Iterable[str]) -> None:
        """Free the memory of tensors that were copied elsewhere.

        Views stay valid: reading them faults the pages in from the file again.
        """
        page = mmap.PAGESIZE
        for name in names:
            entry = self.entry(name)
            begin = entry.offset // page * page
            length = entry.offset + entry.num_bytes - begin
            if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
                self._maps[entry.file][0].madvise(mmap.MADV_DONTNEED, begin, length)

    def _check_against_index(self, weight_map: Mapping[str, str]) -> None:
        for name, file in weight_map.items():
            entry = self._entries.get(name)
            if entry is None or entry.file != file:
                raise CheckpointError(
                    f"{self.directory / file}: tensor {name!r} is missing, though {INDEX_FILE} "
                    "places it there; download the file again"
                )
        self.unindexed = frozenset(self._entries.keys() - weight_map.keys())


def _explain_missing(directory: Path, present: set[str]) -> str:
    parts = sorted(
        name
        for name in present
        if name.endswith(".safetensors") and not name.startswith("consolidated")
    )
    if parts:
        return f"{directory}: {parts[0]} is there, but neither {SINGLE_FILE} nor {INDEX_FILE} is"
    expected = f"expected {SINGLE_FILE}, or {INDEX_FILE} and its files"
    return f"{directory}: no weights in safetensors; {other_format(present) or expected}"


def _read_weight_map(directory: Path, max_tensors: int) -> dict[str, str]:
    max_bytes = min(MAX_INDEX_BYTES, _max_bytes(max_tensors))
    weight_map = read_json_object(directory, INDEX_FILE, max_bytes=max_bytes).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / INDEX_FILE}: weight_map is missing or empty")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{directory / INDEX_FILE}: tensor {name!r} is in {file!r}, "
                "not the name of a .safetensors file"
            )
    return weight_map


def _open_file(path: Path, *, file: str, max_tensors: int) -> tuple[mmap.mmap, dict[str, Entry]]:
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if is_pointer(os.pread(descriptor, len(POINTER), 0)):
            raise CheckpointError(pointer_problem(path))
        if size <= _LENGTH_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, too short for a safetensors file")
        header = _read_header(descriptor, size, file=file, where=str(path), max_tensors=max_tensors)
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), header
    finally:
        os.close(descriptor)


def _as_bytes(mapping: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns once; nothing writes to these.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _max_bytes(max_tensors: int) -> int:
    return _OTHER_BYTES + max_tensors * MAX_ENTRY_BYTES


def _read_header(
    descriptor: int, size: int, *, file: str, where: str, max_tensors: int
) -> dict[str, Entry]:
    length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    begin = _LENGTH_BYTES + length
    max_bytes = min(MAX_HEADER_BYTES, _max_bytes(max_tensors))
    if length > max_bytes:
        raise CheckpointError(
            f"{where}: header of {length} bytes, at most {max_bytes} are allowed for the "
            f"{max_tensors} tensors that may be here; not a safetensors file of this model"
        )
    if begin > size:
        raise CheckpointError(f"{where}: header of {length} bytes in a file of {size}; truncated?")
    content = os.pread(descriptor, length, _LENGTH_BYTES)
    num_objects = content.count(b"{")  # parsed, each needs a hundred times its bytes
    if num_objects > max_tensors + _OTHER_OBJECTS:
        raise CheckpointError(
            f"{where}: header of about {num_objects} tensors, at most {max_tensors} may be here; "
            "not a file of this model"
        )
    header = parse_json_object(content, where=f"{where}: header")
    header.pop("__metadata__", None)
    entries = {
        name: _parse_entry(name, value, file=file, where=where, begin=begin)
        for name, value in header.items()
    }
    _check_layout(entries, where=where, begin=begin, size=size)
    return entries


def _parse_entry(name: str, value: object, *, file: str, where: str, begin: int) -> Entry:
    where = f"{where}: tensor {name!r}"
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: entry is {value!r:.100}, expected an object")
    dtype = value.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where}: unknown type {dtype!r:.100}")
    shape = _naturals(value.get("shape"), where=f"{where}: shape")
    offsets = _naturals(value.get("data_offsets"), where=f"{where}: data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {list(offsets)} are not a range")
    entry = Entry(dtype, shape, file, begin + offsets[0])
    if entry.num_bytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where}: {dtype} of shape {list(shape)} needs {entry.num_bytes} bytes, "
            f"data_offsets hold {offsets[1] - offsets[0]}"
        )
    return entry


def _naturals(value: object, *, where: str) -> tuple[int, ...]:
    if (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(item) is int and 0 <= item < 2**63 for item in value)
    ):
        return tuple(value)
    raise CheckpointError(
        f"{where} is {value!r:.100}, not a list of sizes (at most {MAX_DIMENSIONS} of them)"
    )


def _check_layout(entries: Mapping[str, Entry], *, where: str, begin: int, size: int) -> None:
    ordered = sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes))
    ends = [begin, *(entry.offset + entry.num_bytes for _, entry in ordered)]
    for (name, entry), end in zip(ordered, itertools.islice(ends, len(ordered)), strict=True):
        if entry.offset != end:
            problem = "overlaps the tensor before it" if entry.offset < end else "follows a hole"
            raise CheckpointError(f"{where}: tensor {name!r} {problem} (at byte {entry.offset})")
    if ends[-1] > size:
        name = next(name for name, entry in ordered if entry.offset + entry.num_bytes > size)
        raise CheckpointError(
            f"{where}: truncated in tensor {name!r}: {format_bytes(ends[-1])} expected, "
            f"{format_bytes(size)} there ({ends[-1] - size} bytes short); download the file again"
        )
    if ends[-1] < size:
        raise CheckpointError(f"{where}: {size - ends[-1]} bytes behind the last tensor")
