"""Encodes and decodes in a helper process: a role of `framed_worker`.

Texts come from rows, the tokenizer from a model repository, and its libraries are native code that
may panic, abort, or use any time and memory. No code from the repository is run.

The first process loads the directory with transformers and returns facts and, if the native library
suffices, its tokenizer as JSON: the decoding process and later ones start from that in a tenth of
the time, without transformers.

Requests: {"num_bytes", "has_special", "splits_special"} of each text with the texts' UTF-8 are
answered by {"counts", "errors"} and token ids as int32, {"counts"} with token ids by {"texts",
"errors"}. Errors are by index; such a text has no tokens, or such tokens no text. {"wants_bytes"}
with token ids is answered by {"bytes"}, as hex.
"""

import contextlib
import json
import os
import random
import re
import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tokenizers

Message = dict[str, Any]
Frame = tuple[Message, bytes]

MAX_ERROR_CHARACTERS = 1000
# Factors by which a normalizer may shorten a text: U+1FBE with two accents, 7 bytes, becomes U+0390
# of 2 bytes in NFC. 1 means never; other normalizers have no known bound.
SHORTENING = {"NFC": 4, "Prepend": 1, "Replace": 1}
KEEPING = {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation", "UnicodeScripts"}
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
UNFINISHED = "\ufffd"  # decoders write it for incomplete characters
# Cuts of long texts would split a token with a letter before a space.
LETTER_AND_SPACE = re.compile("[A-Za-z][ \u0120\u2581]")
NUM_PROBES = 400
NUM_END_PROBES = 20  # a tokenizer without the native library is slow
PIECES = (
    *(
        "a",
        "Z",
        "the",
        "McDonald",
        "'s",
        "'LL",
        "é",
        "e\u0301",
        "ß",
        "Ж",
        "语言",
        "。",
        "ไทย",
        "한",
    ),
    *(
        "1",
        "22",
        "333",
        "4444",
        ".",
        ",",
        "...",
        "!?",
        "(",
        "_",
        "-",
        "/",
        "\u2581",
        "\u00a0",
        "🙂",
    ),
    *(" ", "  ", "\t", "\n", "\r\n", "\n\n ", " \n", "\u200d", "\ufeff", "\x00", "  \n\t "),
)


class Codec:
    """A loaded tokenizer.

    Args:
        backend: That of the native library, which does all the work; None if it cannot.
        tokenizer: That of transformers; None if only `backend` was loaded.
    """

    def __init__(self, backend: Any, tokenizer: Any = None) -> None:
        self._backend, self._tokenizer = backend, tokenizer
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()

    @classmethod
    def load(cls, directory: str) -> "Codec":
        # Saves 2 s and 100 MB; no tokenizer needs torch.
        sys.modules["torch"] = None  # type: ignore[assignment]
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
        if not isinstance(tokenizer.model_max_length, int | float):  # it is compared with lengths
            raise ValueError(
                f"model_max_length is {tokenizer.model_max_length!r:.100}; it takes a number"
            )
        # Subclasses may do more than the native library.
        is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
            getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name)
            for name in ("_encode_plus", "_decode", "decode")
        )
        is_plain = is_plain and not (tokenizer.split_special_tokens or _cleans_up(tokenizer))
        return cls(tokenizer.backend_tokenizer if is_plain else None, tokenizer)

    def answer(self, message: Message, blob: bytes) -> Frame:
        if message.get("wants_bytes"):
            return {"bytes": [self._token_bytes(index) for index in _ids(blob)]}, b""
        if "num_bytes" not in message:
            return self._decode(message, _ids(blob)), b""
        texts = [piece.decode() for piece in _split(blob, message["num_bytes"])]
        results: list[list[int]] = [[]] * len(texts)
        errors: dict[int, str] = {}
        kinds = [*zip(message["has_special"], message["splits_special"], strict=True)]
        for kind in sorted(set(kinds)):
            indexes = [i for i, each in enumerate(kinds) if each == kind]
            found, failed = self._encode_each([texts[i] for i in indexes], *kind)
            for index, ids in zip(indexes, found, strict=True):
                results[index] = ids
            errors |= {indexes[i]: error for i, error in failed.items()}
        data = b"".join(array("i", ids).tobytes() for ids in results)
        return {"counts": [*map(len, results)], "errors": errors}, data

    def encode(
        self, texts: Sequence[str], *, has_special: bool, splits_special: bool = False
    ) -> list[list[int]]:
        """Return the token ids that the tokenizer of transformers returns.

        `splits_special` is its `split_special_tokens`.
        """
        if not texts:
            return []
        if self._backend is not None:
            self._backend.encode_special_tokens = splits_special
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=has_special)
            return [encoding.ids for encoding in encodings]
        options = {"add_special_tokens": has_special, "return_attention_mask": False}
        if splits_special:
            options["split_special_tokens"] = True
        return [list(self._tokenizer(text, verbose=False, **options).input_ids) for text in texts]

    def facts(self) -> Frame:
        source = getattr(self._tokenizer, "chat_template", None)  # one, or several by name
        facts = {
            "chat_template": source,
            "special_tokens": self._tokenizer.special_tokens_map,
            "special_token_ids": self._special_token_ids(),
            **self._find_ends(),
        }
        if self._backend is None:
            return facts | {"longest_token_bytes": None, "joint": None}, b""
        facts |= {"longest_token_bytes": longest_token_bytes(self._backend)}
        facts["joint"] = self._find_joint()
        return facts, self._backend.to_str().encode()

    def _token_bytes(self, index: int) -> str | None:
        """Return the bytes of text that a token stands for, as hex; None if they are not known."""
        backend: Any = self._backend or getattr(self._tokenizer, "backend_tokenizer", None)
        found = None
        if backend is not None:
            token = backend.id_to_token(index)
            if token is None:
                return None
            kinds = {part["type"] for part in _parts(backend.decoder)}
            is_added = index in backend.get_added_tokens_decoder()
            found = token_bytes(token, kinds, is_added=is_added)
        if found is None:
            with contextlib.suppress(BaseException):  # the library panics for unknown ids
                text = (self._backend or self._tokenizer).decode([index])
                found = None if UNFINISHED in text else text.encode()
        return None if found is None else found.hex()

    def _special_token_ids(self) -> dict[str, int]:
        tokenizer = self._tokenizer
        added = tokenizer.added_tokens_decoder.items()
        named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        return {token.content: index for index, token in added if token.special} | dict(named)

    def _encode_each(
        self, texts: Sequence[str], has_special: bool, splits_special: bool
    ) -> tuple[list[list[int]], dict[int, str]]:
        try:
            ids = self.encode(texts, has_special=has_special, splits_special=splits_special)
            return ids, {}
        except BaseException as error:  # a panic of the Rust library is no Exception
            if len(texts) == 1:
                return [[]], {0: _describe(error)}
        results: list[list[int]] = []
        errors: dict[int, str] = {}
        for index, text in enumerate(texts):
            ids, failed = self._encode_each([text], has_special, splits_special)
            results += ids
            if failed:
                errors[index] = failed[0]
        return results, errors

    def _decode(self, message: Message, ids: list[int]) -> Message:
        counts, skips = message["counts"], not message.get("keeps_special", False)
        texts, errors, begin = [], {}, 0
        decode = (self._backend or self._tokenizer).decode
        for index, count in enumerate(counts):
            text = ""
            try:
                text = decode(ids[begin : begin + count], skip_special_tokens=skips)
            except BaseException as error:  # a panic of the Rust library
                errors[index] = _describe(error)
            texts.append(text)
            begin += count
        return {"texts": texts, "errors": errors}

    def _find_ends(self) -> Message:
        """Return what is added before and after each text; nothing where that depends on it."""
        lefts, _ = _probes(PIECES)
        texts = lefts[:NUM_END_PROBES]
        plain = self.encode(texts, has_special=False)
        full = self.encode(texts, has_special=True)
        before = next((i for i in range(8) if full[0][i : i + len(plain[0])] == plain[0]), 0)
        prefix, suffix = full[0][:before], full[0][before + len(plain[0]) :]
        if full != [[*prefix, *ids, *suffix] for ids in plain]:
            prefix, suffix = [], []
        return {"prefix": prefix, "suffix": suffix}

    def _find_joint(self) -> str | None:
        """Whether texts can be encoded in pieces that are cut between a letter and a space.

        Returns what later pieces begin with: the space, nothing if the tokenizer adds a space
        itself, or None if the tokens would differ from those of the whole text. No token may span
        the cut; that nothing else depends on what is beyond it (regular expressions, normalizers,
        added tokens) is tested with many texts.
        """
        added = self._backend.get_added_tokens_decoder().values()
        names = [token.content for token in added]
        if any(map(LETTER_AND_SPACE.search, self._backend.get_vocab())) or any(
            token.rstrip and token.content[-1:].isalpha() for token in added
        ):
            return None
        lefts, rights = _probes([*PIECES, *names[:50]])
        wholes = [f"{left} {right}" for left, right in zip(lefts, rights, strict=True)]
        plain = self.encode(wholes, has_special=False)
        full = self.encode(wholes, has_special=True)
        ends = self._find_ends()
        if full != [[*ends["prefix"], *ids, *ends["suffix"]] for ids in plain]:
            return None
        first = self.encode(lefts, has_special=False)
        for joint in (" ", ""):
            second = self.encode([joint + right for right in rights], has_special=False)
            if plain == [[*a, *b] for a, b in zip(first, second, strict=True)]:
                return joint
        return None


def _probes(pieces: Sequence[str]) -> tuple[list[str], list[str]]:
    choose = random.Random(0)

    def some() -> str:
        return "".join(choose.choices(pieces, k=choose.randint(0, 12)))

    letters = ("a", "Z", "the", "don't", "it's", "x1y")
    lefts = [some() + choose.choice(letters) for _ in range(NUM_PROBES)]
    return lefts, [choose.choice(letters) + some() for _ in range(NUM_PROBES)]


def token_bytes(token: str, decoders: Collection[str], *, is_added: bool) -> bytes | None:
    """Return what a token stands for; None if only the decoder knows.

    Args:
        decoders: Their types.
        is_added: Whether it is written as it is, as special tokens are.
    """
    if is_added and not ("ByteFallback" in decoders and BYTE_TOKEN.fullmatch(token)):
        return token.encode()
    if "ByteLevel" in decoders and ALPHABET.keys() >= {*token}:
        return bytes(ALPHABET[character] for character in token)
    if "ByteFallback" in decoders and (found := BYTE_TOKEN.fullmatch(token)):
        return bytes.fromhex(found[1])
    if {"ByteFallback", "Metaspace"}.intersection(decoders):
        return token.replace("\u2581", " ").encode()
    return None


def _alphabet() -> dict[str, int]:
    """The bytes of the characters that byte-level tokenizers write for them."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {chr(byte): byte for byte in visible}
    return characters | {chr(256 + index): byte for index, byte in enumerate(hidden)}


ALPHABET = _alphabet()


def longest_token_bytes(backend: Any) -> int | None:
    """Return the largest number of text bytes of a token; None if there is no such bound."""
    model, vocabulary = backend.model, backend.get_vocab()
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    normalizers = list(_parts(backend.normalizer))
    kinds = [part["type"] for part in _parts(backend.pre_tokenizer)]
    if type(model).__name__ != "BPE" or any(
        token.lstrip or token.rstrip for token in added.values()
    ):
        return None
    if not KEEPING.issuperset(kinds) or _removes(backend.pre_tokenizer):
        return None
    factor = 1
    for part in normalizers:
        if part["type"] not in SHORTENING or not _keeps_length(part):
            return None
        factor *= SHORTENING[part["type"]]
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    is_byte_level = "ByteLevel" in kinds and vocabulary.keys() >= alphabet
    has_bytes = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not is_byte_level and not has_bytes:
        return None  # text outside of the vocabulary vanishes or becomes one token
    lengths = [
        len(token) if is_byte_level and token not in added else len(token.encode())
        for token in vocabulary
    ]
    return factor * max(lengths)


def _keeps_length(part: Message) -> bool:
    if part["type"] != "Replace":
        return True
    pattern = part["pattern"].get("String")
    return pattern is not None and len(part["content"].encode()) >= len(pattern.encode())


def _removes(pre_tokenizer: Any) -> bool:
    return any(part.get("behavior") == "Removed" for part in _parts(pre_tokenizer))


def _parts(component: Any) -> Iterator[Message]:
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop(0)
        inner = part.get("normalizers", part.get("pretokenizers", part.get("decoders")))
        if inner is None:
            yield part
        else:
            waiting = [*inner, *waiting]


def _split(blob: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    begin = 0
    for size in sizes:
        yield blob[begin : begin + size]
        begin += size


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]


def _ids(blob: bytes) -> list[int]:
    return array("i", blob).tolist()


def _cleans_up(tokenizer: Any) -> bool:
    name = "clean_up_tokenization_spaces"
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    corrupts = getattr(tokenizer, f"{name}_for_bpe_even_though_it_will_corrupt_output", True)
    return bool(getattr(tokenizer, name)) and (corrupts or not is_bpe)


def start(settings: Message, blob: bytes) -> tuple[Frame, Callable[[Message, bytes], Frame]]:
    """Load a tokenizer from its directory, or from the JSON of an earlier process."""
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # cores compute
    os.putenv("RUST_BACKTRACE", "0")
    if blob:
        return ({}, b""), Codec(tokenizers.Tokenizer.from_buffer(blob)).answer
    codec = Codec.load(settings["directory"])
    return codec.facts() if settings["wants_facts"] else ({}, b""), codec.answer
