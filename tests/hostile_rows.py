"""Rows that try to hurt, among rows that do not: one table for all tests of what a row may do.

A row is a dict with `id` and `kind` ("" for a plain row), and some of prompt, messages and
sampling_params. Its cells have the types that users give: text, bytes, token ids, structs.
"""

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tests.hostile_forms import exploding_outputs, malformed_outputs, nested, slow_outputs

Row = dict[str, Any]

FIRST_ID = "row-0"
CONTEXT_TOKENS = 512  # of the tiny model; its tokens are bytes, its ids end at 263
COLUMNS = ("id", "kind", "prompt", "messages", "sampling_params")
SURROGATES = r"a[\ud800-\udfff]b"

# Kinds that ask for something unusual, not for something wrong: they may have an answer.
MAY_ANSWER = frozenset(
    {
        "duplicate id",
        "empty id",
        "null id",
        "huge id",
        "id with a lone surrogate",
        "dead end of a choice",
        "control characters",
        "combining characters",
        "every logit biased away",
        "end of text biased away",
        "many samples",
        "empty sampling_params",
        "unseen tokens",
        "messages with extra keys",
        "deep part of a message",
        "special tokens in text",
    }
)
# Kinds whose ids name no one row: a command refuses a table with them.
WITHOUT_ID = frozenset({"duplicate id", "null id", "empty id"})
# Kinds that keep a compiler busy for seconds each.
SLOW = frozenset(
    {f"exploding form {i}" for i in range(len(exploding_outputs()))}
    | {f"slow form {i}" for i in range(len(slow_outputs()))}
)


def hostile_rows(rng: random.Random) -> list[tuple[str, Row]]:
    """One row of each kind: its name and its cells. Most have no id of their own."""
    kinds = (_prompts, _messages, _parameters, _forms, _ids)
    return [(name, row) for make in kinds for name, row in make(rng)]


def random_rows(
    rng: random.Random,
    count: int,
    hostile_share: float,
    *,
    without: frozenset[str] = frozenset(),
    max_tokens: int = 24,
) -> list[Row]:
    """Rows of random types, a share of them hostile, each kind about as often as any other."""
    hostile: list[tuple[str, Row]] = []
    rows = []
    for index in range(count):
        row = {"id": f"row-{index}", "kind": ""}
        if index and rng.random() < hostile_share:
            if not hostile:
                hostile = [named for named in hostile_rows(rng) if named[0] not in without]
                rng.shuffle(hostile)
            name, cells = hostile.pop()
            rows.append({**row, "kind": name, **cells})
        else:
            rows.append({**row, **_plain(rng, max_tokens)})
    return rows


def as_tables(rows: list[Row], rows_per_table: int) -> Iterator[pa.Table]:
    """Tables of rows whose cells have types that one column can hold, in the order of the rows."""
    waiting: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        types = tuple(_type_of(row.get(name)) for name in COLUMNS)
        waiting[types].append(row)
        if len(waiting[types]) == rows_per_table:
            yield _table(waiting.pop(types))
    for rest in waiting.values():
        yield _table(rest)


def answers(table: pa.Table) -> list[tuple[tuple[Any, str], Row]]:
    """Id (as bytes: some are no UTF-8) and kind of each row that came out, and what was added."""
    ids = table.column("id").cast(pa.binary()).to_pylist()
    keys = zip(ids, table.column("kind").to_pylist(), strict=True)
    return list(zip(keys, table.drop_columns(list(COLUMNS)).to_pylist(), strict=True))


def _plain(rng: random.Random, max_tokens: int) -> Row:
    text = _text(rng)
    options = {name: value for name, value in _harmless_options(rng) if rng.random() < 0.1}
    params = {"max_tokens": rng.randint(1, max_tokens), **options}
    as_params = rng.choice((json.dumps(params), json.dumps(params), json.dumps(params).encode()))
    plain_struct = {"max_tokens": params["max_tokens"], "temperature": rng.random() * 2}
    message = {"role": rng.choice(("user", "system")), "content": text}
    return rng.choice(
        (
            {"prompt": text, "sampling_params": as_params},
            {"prompt": text, "sampling_params": json.dumps(params)},
            {"prompt": text, "sampling_params": json.dumps(params)},
            {"prompt": text, "sampling_params": plain_struct},
            {"prompt": text.encode(), "sampling_params": json.dumps(params)},
            {"prompt": list(text.encode()), "sampling_params": json.dumps(params)},
            {"messages": json.dumps([message]), "sampling_params": json.dumps(params)},
            {"messages": [message], "sampling_params": json.dumps(params)},
        )
    )


def _text(rng: random.Random) -> str:
    alphabet = rng.choice(
        ("abc def", "éß日本語 ", "0123456789.,\n\t", "🙂👩\u200d👩 x", '{}[]":\\')
    )
    return "".join(rng.choices(alphabet, k=rng.randint(1, 40)))


def _harmless_options(rng: random.Random) -> list[tuple[str, Any]]:
    return [
        ("temperature", rng.choice((0, 0.5, 1, 2))),
        ("top_p", rng.choice((0.1, 0.9, 1))),
        ("top_k", rng.choice((-1, 1, 5, 10**6))),
        ("min_p", rng.random()),
        ("repetition_penalty", 0.5 + rng.random()),
        ("presence_penalty", rng.random()),
        ("frequency_penalty", -rng.random()),
        ("seed", rng.randrange(2**62)),
        ("stop", rng.choice(("a", ["b", "é"], []))),
        ("stop_token_ids", [rng.randrange(264)]),
        ("ignore_eos", True),
        ("logit_bias", {str(rng.randrange(264)): rng.uniform(-9, 9)}),
    ]


def _prompts(rng: random.Random) -> Iterator[tuple[str, Row]]:
    number = rng.randrange(10**6)
    yield "no prompt", {}
    yield "null prompt", {"prompt": None, "messages": None, "sampling_params": None}
    yield "empty prompt", {"prompt": ""}
    yield "empty bytes", {"prompt": b""}
    yield "no tokens", {"prompt": pa.scalar([], pa.list_(pa.int64())).as_py()}
    yield "number as prompt", {"prompt": number}
    yield "NaN as prompt", {"prompt": math.nan}
    yield "flag as prompt", {"prompt": True}
    yield "struct as prompt", {"prompt": {"text": "x"}}
    yield "texts as prompt", {"prompt": ["a", "b"]}
    yield "fractions as tokens", {"prompt": [1.5, math.nan]}
    yield "lists as tokens", {"prompt": [[1, 2], [3]]}
    yield "token out of range", {"prompt": [5, 264 + rng.randrange(2**20)]}
    yield "huge token", {"prompt": [2**62, 1]}
    yield "negative token", {"prompt": [1, -1 - rng.randrange(9)]}
    yield "null token", {"prompt": [1, None, 2]}
    yield "unseen tokens", {"prompt": [260, 261, 262, 263]}
    yield "too many tokens", {"prompt": [7] * (CONTEXT_TOKENS + 1)}
    yield "a million tokens", {"prompt": [7] * 10**6}
    yield "bytes that are not UTF-8", {"prompt": b"caf\xe9 \xff\xfe"}
    yield "lone surrogate", {"prompt": f"a{chr(rng.randint(0xD800, 0xDFFF))}b"}
    yield "control characters", {"prompt": "".join(map(chr, range(32))) + "\x7f\x80\u2028\ufeff"}
    yield "combining characters", {"prompt": "e" + "\u0301" * 200}
    yield "special tokens in text", {"prompt": "</s><s><pad><unk>" * 4}
    yield "a megabyte of spaces", {"prompt": " " * 2**20 + "x"}
    yield "a megabyte of letters", {"prompt": "x" * 2**20}
    yield "a megabyte of surprises", {"prompt": "".join(rng.choices("🙂é\n\0x", k=2**18)) * 2}
    yield "too long by one", {"prompt": "y" * CONTEXT_TOKENS}


def _messages(rng: random.Random) -> Iterator[tuple[str, Row]]:
    user = {"role": "user", "content": "hello"}
    deep = "[" * 50_000 + "]" * 50_000
    yield "prompt and messages", {"prompt": "x", "messages": json.dumps([user])}
    yield "messages that are no JSON", {"messages": '[{"role": "user"'}
    yield "deep messages", {"messages": deep}
    yield (
        "deep part of a message",
        {"messages": f'[{{"role": "user", "content": "x", "more": {"[" * 700 + "]" * 700}}}]'},
    )
    yield "messages of a number", {"messages": str(rng.randrange(9))}
    yield "no messages", {"messages": "[]"}
    yield "null message", {"messages": "[null]"}
    yield "message without role", {"messages": json.dumps([{"content": "x"}])}
    yield "message without content", {"messages": json.dumps([{"role": "user"}])}
    yield "role of a number", {"messages": json.dumps([{"role": 1, "content": "x"}])}
    yield "content of a number", {"messages": json.dumps([{"role": "user", "content": 7}])}
    part = {"type": "image_url", "image_url": {"url": "x"}}
    yield "image", {"messages": json.dumps([{"role": "user", "content": [part]}])}
    yield "lone surrogate in a message", {"messages": r'[{"role": "user", "content": "\ud800"}]'}
    yield "NaN in a message", {"messages": '[{"role": "user", "content": NaN}]'}
    yield "huge number in a message", {"messages": "[" + "9" * 10_000 + "]"}
    yield "messages of bytes that are not UTF-8", {"messages": b'[{"role": "\xff"}]'}
    yield "messages of numbers", {"messages": [1, 2]}
    yield "many messages", {"messages": json.dumps([user] * 20_000)}
    yield (
        "messages with extra keys",
        {"messages": json.dumps([{**user, "x": [None, 1e300]}])},
    )


def _parameters(rng: random.Random) -> Iterator[tuple[str, Row]]:
    wrong: dict[str, list[Any]] = {
        "max_tokens": [0, -1, 2**20 + 1, 10**30, 1.5, "four", True, [1]],
        "min_tokens": [-1, 10**9],
        "temperature": [-1, "hot", [0.5], 1e6],
        "top_p": [0, -0.1, 1.1, {}],
        "top_k": [-2, 2**40, 0.5],
        "min_p": [-1, 2],
        "no_repeat_ngram_size": [-1, 2**40, "two"],
        "repetition_penalty": [0, -1, 1e9],
        "presence_penalty": [-3, 1e300],
        "frequency_penalty": [3, "x"],
        "seed": [-2, 2**64],
        "n": [0, -5, 10**6, 65],
        "logprobs": [-1, 10**6],
        "prompt_logprobs": [-1, 10**6],
        "ignore_eos": ["yes", 1],
        "stop": ["", ["", "a"], "s" * 10**5, ["s"] * 1000, 5, [None], [["a"]]],
        "stop_token_ids": [[-1], ["x"], [2**40], list(range(1000)), 5],
        "logit_bias": [{"x": 1}, {"-1": 1}, {"264": 1}, {"1": 1e9}, {"1": "a"}, [1], {"9" * 50: 1}],
        "max_token": [4],
        "constructor": [{}],
        "": [1],
    }
    for name, values in wrong.items():
        value = rng.choice(values)
        yield f"wrong {name or 'nameless parameter'}", _asking(**{name: value})
    for text in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 10_000):
        yield f"temperature of {text[:9]}", _asking_in(f'{{"temperature": {text}}}')
    yield "parameters that are no JSON", _asking_in('{"temperature"')
    yield "deep parameters", _asking_in('{"stop": ' + "[" * 50_000)
    yield "deep parameter", _asking_in(f'{{"stop": {"[" * 700 + "]" * 700}}}')
    yield "a list of parameters", _asking_in("[1, 2]")
    yield "a number of parameters", {"prompt": "x", "sampling_params": rng.randrange(9)}
    yield "parameters that are not UTF-8", {"prompt": "x", "sampling_params": b"\xff\xfe"}
    yield "lone surrogate in parameters", _asking_in(f'{{"stop": "{chr(0xDC80)}"}}')
    yield "many parameters", _asking(**{f"p{i}": i for i in range(20_000)})
    yield "struct of wrong parameters", {"prompt": "x", "sampling_params": {"temperature": "hot"}}
    yield "empty sampling_params", _asking_in(" ")
    yield "every logit biased away", _asking(logit_bias={str(i): -100 for i in range(264)})
    yield "end of text biased away", _asking(logit_bias={"2": -100}, logprobs=2)
    yield "many samples", _asking(n=64, max_tokens=2)


def _forms(rng: random.Random) -> Iterator[tuple[str, Row]]:
    variant = rng.randrange(100)
    # A token's way is barred in the middle of the text, with all that looks at the token.
    yield "dead end", _formed({"regex": SURROGATES}, logprobs=2)
    yield "dead end without logprobs", _formed({"regex": SURROGATES})
    yield "dead end of a choice", _formed({"choice": ["é"]}, logit_bias=_bias_of("é"), logprobs=1)
    grammar = r'root ::= "a" [\ud800-\udfff] "b"'
    yield "dead end of a grammar", _formed({"grammar": grammar}, logprobs=2)
    for index, (outputs, _) in enumerate(malformed_outputs()):
        yield f"malformed form {index}", _formed(outputs)
    yield "deep schema in a string", _formed({"json": nested(3000)})
    yield "form of a number", _formed(variant)
    yield "unknown form", _formed({"yaml": "x"})
    yield "no form", _formed({})
    yield "empty regex", _formed({"regex": ""})
    yield "lone surrogate in a regex", _formed({"regex": "a\ud800"})
    yield "huge choice", _formed({"choice": ["z" * 1000] * 1000})
    yield "form and min_tokens", _formed({"regex": "a"}, min_tokens=3)
    for index, outputs in enumerate(exploding_outputs(variant)):
        yield f"exploding form {index}", _formed(outputs)
    for index, outputs in enumerate(slow_outputs(variant)):
        endless = {**_bias_of("@"), "2": -100.0}  # nor the end of text
        yield f"slow form {index}", _formed(outputs, logit_bias=endless, max_tokens=400)


def _ids(rng: random.Random) -> Iterator[tuple[str, Row]]:
    text = _text(rng)
    yield "duplicate id", {"id": FIRST_ID, "prompt": text}
    yield "null id", {"id": None, "prompt": text}
    yield "empty id", {"id": "", "prompt": text}
    yield "huge id", {"id": f"{rng.randrange(10**9)}-" + "i" * 10**5, "prompt": text}
    yield "id with a lone surrogate", {"id": f"{rng.randrange(10**9)}\ud800", "prompt": text}


def _asking(**params: Any) -> Row:
    return _asking_in(json.dumps(params))


def _asking_in(text: str) -> Row:
    return {"prompt": "hello", "sampling_params": text}


def _formed(outputs: Any, **params: Any) -> Row:
    return _asking(**{"max_tokens": 40, "structured_outputs": outputs, **params})


def _bias_of(text: str) -> dict[str, float]:
    """Keeps the tiny model from the bytes of a text: its ids follow the sorted alphabet."""
    from tokenizers import pre_tokenizers  # noqa: PLC0415 - only for these rows

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = split.pre_tokenize_str(text)[0][0]
    return {str(4 + alphabet.index(character)): -100.0 for character in characters}


def _type_of(cell: Any) -> str:
    if cell is None or isinstance(cell, str):
        return "text"  # a null fits in any column; these stand among text
    if isinstance(cell, list) and all(isinstance(item, int | None) for item in cell):
        return "list<int64>"
    return str(pa.infer_type([cell]))


def _table(rows: list[Row]) -> pa.Table:
    return pa.table({name: _column([row.get(name) for row in rows]) for name in COLUMNS})


def _column(cells: list[Any]) -> pa.Array:
    if not all(isinstance(cell, str | None) for cell in cells):
        tokens = pa.list_(pa.int64())
        return pa.array(cells, tokens if _type_of(cells[0]) == str(tokens) else None)
    # Text that Arrow holds, though UTF-8 does not allow it: files have such.
    encoded = [None if cell is None else cell.encode("utf-8", "surrogatepass") for cell in cells]
    return pa.array(encoded, pa.binary()).view(pa.string())
