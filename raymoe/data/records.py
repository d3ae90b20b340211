"""What is a record of a journal? A finished row in bytes that show whether they are whole.

    length of the payload   4 bytes, little-endian
    checksum                4 bytes: CRC-32 of everything else in the record
    key                     16 bytes
    payload                 JSON of a `Generation`

The checksum finds what a crash or a disk does to a file, not what an attacker does: CRC-32 sees all
damage of up to 32 bits in a row and misses one in 2^32 of others, is in the standard library, which
CRC-32C is not, and reads faster than any disk. Length and key are under it, so that the zeros that
some file systems leave after a crash are no record.
"""

import dataclasses
import json
import struct
import zlib
from collections.abc import Iterator
from io import BufferedReader
from typing import Any, NamedTuple

from raymoe.engine.generation import Generation, TokenLogprob
from raymoe.units import MIB

MAGIC = b"raymoej1"
KEY_BYTES = 16
MAX_PAYLOAD_BYTES = 256 * MIB  # a damaged length must not make a reader take all memory

_HEADER = struct.Struct(f"<II{KEY_BYTES}s")
HEADER_BYTES = _HEADER.size
_LENGTH = struct.Struct("<I")
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Generation)}


class DamagedRecordError(Exception):
    """Bytes that are no whole record; says why. The reader ignores them and what follows."""


class UnfinishedRecordError(DamagedRecordError):
    """The file ends inside of a record: its writer was killed, or is still writing."""


class Record(NamedTuple):
    """A record where it was found."""

    key: bytes
    offset: int
    payload: bytes

    @property
    def end(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset + HEADER_BYTES + len(self.payload)


def pack_record(key: bytes, payload: bytes) -> bytes:
    """Return the bytes of a record."""
    return _HEADER.pack(len(payload), _checksum(key, payload), key) + payload


def read_record(file: BufferedReader, offset: int) -> Record:
    """Read the record that begins at `offset`.

    Raises:
        DamagedRecordError: There is none.
    """
    file.seek(offset)
    return _read_next(file, offset)


def read_records(file: BufferedReader) -> Iterator[Record]:
    """Yield the records of a file from its begin to its end, one in memory at a time.

    Raises:
        DamagedRecordError: After the last whole record, if anything follows it.
    """
    file.seek(0)
    magic = file.read(len(MAGIC))
    if len(magic) < len(MAGIC) and MAGIC.startswith(magic):
        raise UnfinishedRecordError("it has no record yet")
    if magic != MAGIC:
        raise DamagedRecordError("it does not begin as a journal does")
    offset = len(MAGIC)
    while file.peek(1):
        record = _read_next(file, offset)
        yield record
        offset = record.end


def _read_next(file: BufferedReader, offset: int) -> Record:
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise UnfinishedRecordError(f"it ends inside of the record at byte {offset}")
    length, checksum, key = _HEADER.unpack(header)
    if not 0 < length <= MAX_PAYLOAD_BYTES:
        raise DamagedRecordError(f"the record at byte {offset} is damaged")
    payload = file.read(length)
    if len(payload) < length:
        raise UnfinishedRecordError(f"it ends inside of the record at byte {offset}")
    if checksum != _checksum(key, payload):
        raise DamagedRecordError(f"the record at byte {offset} is damaged")
    return Record(key, offset, payload)


def _checksum(key: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(key, zlib.crc32(_LENGTH.pack(len(payload)))))


def encode_generation(generation: Generation) -> bytes:
    """Return everything that a generation holds; what is as by default is left out."""
    plain = _plain(generation)
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )


def decode_generation(payload: bytes) -> Generation:
    """Return the generation that `encode_generation` was given, equal in every field."""
    return _generation(json.loads(payload.decode("utf-8", "surrogatepass")))


def _plain(generation: Generation) -> dict[str, Any]:
    plain = {name: getattr(generation, name) for name in _DEFAULTS}
    changed = {name: value for name, value in plain.items() if value != _DEFAULTS[name]}
    for name in ("logprobs", "prompt_logprobs"):
        if changed.get(name) is not None:
            changed[name] = [_plain_logprob(entry) for entry in changed[name]]
    if "others" in changed:
        changed["others"] = [_plain(other) for other in generation.others]
    return changed


def _plain_logprob(entry: TokenLogprob | None) -> list[Any] | None:
    return None if entry is None else [entry.token_id, entry.logprob, entry.top]


def _generation(plain: dict[str, Any]) -> Generation:
    fields = dict(plain)
    if "token_ids" in fields:
        fields["token_ids"] = tuple(fields["token_ids"])
    for name in ("logprobs", "prompt_logprobs"):
        if name in fields:
            fields[name] = tuple(_logprob(entry) for entry in fields[name])
    if "others" in fields:
        fields["others"] = tuple(_generation(other) for other in fields["others"])
    return Generation(**fields)


def _logprob(entry: list[Any] | None) -> TokenLogprob | None:
    if entry is None:
        return None
    token_id, logprob, top = entry
    return TokenLogprob(token_id, logprob, tuple((token, value) for token, value in top))
