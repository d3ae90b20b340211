"""How fast are structured outputs? `python -m tools.bench_structured compile|rows|hostile`.

`compile`: CPU time of seven schemas with a synthetic vocabulary, and of their bitmasks.
`rows`: tokens per second of rows with a schema of 20 fields, on the trained demo model or, with
`--vocab-size`, on random weights with a synthetic vocabulary.
`hostile`: how much longer plain rows take beside rows whose forms explode, are slow or malformed.
"""

import argparse
import json
import math
import random
import statistics
import string
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from raymoe.assets import demo_model_path
from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.engine.grammars import compile_request
from raymoe.engine.workers.grammar_worker import PARSER_LIMITS, grammar_text, load_vocabulary
from raymoe.structured import StructuredOutputs
from tests.hostile_forms import exploding_outputs, malformed_outputs, slow_outputs

VOCAB_SIZE = 128_000
PAD, BOS, EOS = 0, 1, 2
NUM_MASKS = 200
COLUMNS = ("schema", "compile_ms", "median_mask_ms", "max_mask_ms")


def object_of(**properties: dict[str, Any]) -> dict[str, Any]:
    """A closed object whose properties are all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def text_of(length: int) -> dict[str, Any]:
    """A string of at most that many characters."""
    return {"type": "string", "maxLength": length}


KINDS = (
    {"type": "integer", "minimum": 0, "maximum": 999},
    {"type": "boolean"},
    {"enum": ["red", "green", "blue"]},
    {"type": "string", "maxLength": 8},
)
FIELDS = object_of(**{f"field_{index}": KINDS[index % 4] for index in range(20)})
SCHEMAS = {
    "simple": object_of(name={"type": "string"}, age={"type": "integer"}),
    "maxLength 200": object_of(text=text_of(200)),
    "maxLength 2000": object_of(text=text_of(2000)),
    "five maxLengths": object_of(**{f"t{n}": text_of(n) for n in (50, 100, 200, 300, 450)}),
    "20 fields": FIELDS,
    "pattern": object_of(name={"type": "string", "pattern": "^[A-Z][a-z]{2,20}( [A-Z][a-z]+)?$"}),
    "enum 500": object_of(kind={"enum": [f"value number {index}" for index in range(500)]}),
}


def synthetic_words(count: int) -> list[str]:
    """Pieces of text in the alphabet of byte-level tokenizers, where Ġ is a space."""
    rng = random.Random(0)
    words: dict[str, None] = {}
    while len(words) < count:
        word = "".join(rng.choices(string.ascii_lowercase + "eeeaaioutns", k=rng.randrange(2, 9)))
        start = rng.choice(("", "", "", "Ġ", "Ġ", "Ġ", '"', '":Ġ"', '",', "1", "{"))
        words[start + (word.capitalize() if rng.random() < 0.1 else word)] = None
    return list(words)


def write_synthetic_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer of that size; texts are encoded by bytes."""
    first = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = [*first, *synthetic_words(vocab_size - len(first))]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


def write_random_model(directory: Path, vocab_size: int) -> None:
    """Write the configuration of a small model and a synthetic tokenizer."""
    AutoConfig.for_model(
        "mixtral", hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=32,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        vocab_size=vocab_size, max_position_embeddings=1024,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    ).save_pretrained(directory)  # fmt: skip
    write_synthetic_tokenizer(directory, vocab_size)


def measure_grammars(vocab_size: int) -> dict[str, tuple[float, float, float]]:
    """CPU milliseconds by schema: to compile it, of the median bitmask, and of the slowest."""
    with tempfile.TemporaryDirectory(prefix="raymoe-") as directory:
        write_synthetic_tokenizer(Path(directory), vocab_size)
        vocabulary = load_vocabulary(directory, vocab_size, [EOS])
    limits = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]
    found = {}
    for name, schema in SCHEMAS.items():
        rng = random.Random(0)
        compile_s = math.inf
        for _ in range(3):
            begin_s = time.process_time()
            text = grammar_text(**compile_request(StructuredOutputs.of({"json": schema})))
            matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
            compile_s = min(compile_s, time.process_time() - begin_s)
        masks_s = []
        for _ in range(NUM_MASKS):
            begin_s = time.process_time()
            mask = matcher.compute_bitmask()
            masks_s.append(time.process_time() - begin_s)
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            token = int(rng.choice(np.flatnonzero(bits)))
            if token == EOS or not matcher.consume_token(token):
                break
        assert not matcher.is_error(), matcher.get_error()
        found[name] = (1e3 * compile_s, 1e3 * statistics.median(masks_s), 1e3 * max(masks_s))
    return found


def run_rows(engine: Engine, num_rows: int, *, is_structured: bool) -> tuple[float, int]:
    """Generate rows; returns tokens per second and the number of rows with an error."""
    params: dict[str, Any] = {"max_tokens": 420, "temperature": 1.0}
    if is_structured:
        form = {"json": FIELDS, "disable_any_whitespace": True}
        params["structured_outputs"] = form
    else:
        params |= {"ignore_eos": True, "max_tokens": 300}
    begin_s = time.perf_counter()
    generations = engine.generate([f"row {index}" for index in range(num_rows)], params)
    elapsed_s = time.perf_counter() - begin_s
    num_tokens = sum(generation.num_generated_tokens for generation in generations)
    return num_tokens / elapsed_s, sum(bool(generation.error) for generation in generations)


def measure_rows(num_rows: int, vocab_size: int | None) -> None:
    """Print tokens per second of structured rows, and of plain ones as a reference."""
    with tempfile.TemporaryDirectory(prefix="raymoe-") as directory:
        path, load_format = Path(demo_model_path()), "auto"
        if vocab_size is not None:
            path, load_format = Path(directory), "dummy"
            write_random_model(path, vocab_size)
        with Engine.from_pretrained(path, EngineConfig(load_format=load_format)) as engine:
            run_rows(engine, 4, is_structured=True)  # starts the worker
            for is_structured in (True, False):
                speed, num_errors = run_rows(engine, num_rows, is_structured=is_structured)
                kind = "structured" if is_structured else "plain"
                print(f"{num_rows} {kind} rows: {speed:.0f} tokens/s, {num_errors} errors")


def measure_beside_hostile(num_plain: int, num_hostile: int) -> None:
    """Print how long plain rows take alone and beside hostile ones, and that tokens are equal."""
    forms: list[Any] = [outputs for outputs, _ in malformed_outputs()]
    for variant in range(num_hostile):
        forms += [*exploding_outputs(variant), *slow_outputs(variant)]
    plain = {"max_tokens": 64, "ignore_eos": True, "temperature": 1.0}
    hostile = [{"max_tokens": 400, "structured_outputs": form} for form in forms[-num_hostile:]]
    prompts = [f"row {index}" for index in range(num_plain)]
    with Engine.from_pretrained(demo_model_path(), EngineConfig()) as engine:
        run_rows(engine, 4, is_structured=True)
        times, tokens = [], []
        for company in ([], hostile):
            begin_s = time.perf_counter()
            others = engine.submit(["x"] * len(company), company)
            rows = [future.result() for future in engine.submit(prompts, plain)]
            times.append(time.perf_counter() - begin_s)
            tokens.append([row.token_ids for row in rows])
            num_errors = sum(future.result().finish_reason == "error" for future in others)
    assert tokens[0] == tokens[1]
    print(
        f"{num_plain} plain rows: {times[0]:.1f} s alone, {times[1]:.1f} s beside {len(hostile)} "
        f"hostile ones, of which {num_errors} ended as error rows"
    )


def main() -> None:
    """Parse the arguments and print figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("compile", "rows", "hostile"))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--vocab-size", type=int)
    options = parser.parse_args()
    if options.what == "compile":
        for name, times in measure_grammars(options.vocab_size or VOCAB_SIZE).items():
            line = dict(zip(COLUMNS, (name, *(round(ms, 3) for ms in times)), strict=True))
            print(json.dumps(line))
    elif options.what == "rows":
        measure_rows(options.rows, options.vocab_size)
    else:
        measure_beside_hostile(options.rows, 20)


if __name__ == "__main__":
    main()
