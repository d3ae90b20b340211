"""Print what is known of published and tested models: compare the output of two commits.

`python -m tools.pin_models` prints a line for each model: digests of names and shapes of weights,
operations and bytes, sizes of buffers, and what `raymoe models` says. `--verdicts N` prints what is
said of N configurations instead, each with one field changed.
"""

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from raymoe.cli.models import rows_of
from raymoe.errors import RaymoeError
from raymoe.model.loading import decoder_arena_bytes
from raymoe.plan.work import LayerWork, ModelWork
from raymoe.specs.attention.work import AttentionShape
from raymoe.specs.layer_weights import layer_parts, ngram_tables, token_tables
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS
from tests.parity.configurations import CONFIGURATIONS

PUBLISHED = Path(__file__).parents[1] / "tests" / "data" / "published_models.json"
SHAPES = (
    AttentionShape(rows=8, decode_rows=8, pairs=8 * 700, context_tokens=8 * 700),
    AttentionShape(rows=900, prompt_pairs=900 * 450.5, context_tokens=900),
    AttentionShape(
        rows=5003, decode_rows=3, pairs=3 * 9000, prompt_pairs=5e3 * 2500, context_tokens=32e3
    ),
)
CHANGES: tuple[object, ...] = (None, 0, 1, -1, 2, 3, 0.5, True, False, "", "silu", [], {}, 10**9)


def configurations() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for published in json.loads(PUBLISHED.read_text()):
        yield published["name"], published["config"]
    yield from MODEL_PRESETS.items()
    for case in CONFIGURATIONS:
        yield case.name, {"model_type": case.family, **case.fields}


def _numbers(work: LayerWork) -> list[object]:
    attention = work.attention
    return [
        *([found.flop, *found] for found in map(attention.of, SHAPES)),
        [work.activated_experts(tokens) for tokens in (1, 100)],
        [work.weight_bytes(work.num_experts), attention.kv_token_bytes, attention.state_bytes],
        [
            attention.updated_bytes,
            attention.token_flop,
            work.attention_parameters,
            work.router_parameters,
        ],
        [
            work.ffn_token_flop,
            attention.query_width,
            attention.output_width,
            *attention.token_sizes,
        ],
    ]


def _model(spec: ModelSpec) -> Iterator[object]:
    yield [spec.num_parameters, spec.num_active_parameters, spec.stored_bytes, spec.has_states]
    yield [spec.cache_window, spec.num_past_tokens, spec.table_bytes, spec.restart_length]
    yield dict(rows_of(spec))
    yield {name: list(shape) for name, shape in spec.outer_weights().items()}
    for element, kv in ((4, 4), (2, 2), (2, 1)):
        work = ModelWork.of(spec, element, kv_element_bytes=kv)
        yield [work.token_flop, work.head_flop, work.kv_token_bytes, work.state_bytes]
        yield [work.updated_bytes, work.all_weight_bytes, work.embedding_bytes(3)]
        yield [work.around_attention_bytes, work.windowed_token_bytes, work.mixing_bytes(3, 2)]
        yield [_numbers(layer) for layer in work.kinds]
    for length in (1, 4096):
        yield [layer.attention.cache_width for layer in spec.within(length).layers]
    for layer in dict.fromkeys(spec.layers):
        parts = layer_parts(layer, spec.hidden_size)
        yield [
            [part.name, {name: list(shape) for name, shape in part.shapes.items()}]
            for part in parts
        ]
        yield [
            [each.name, list(each.shape)] for each in (*token_tables(layer), *ngram_tables(layer))
        ]
    for dtype in (torch.float32, torch.bfloat16):
        yield decoder_arena_bytes(spec, dtype)


def _digest(spec: ModelSpec) -> str:
    return " ".join(sha256(json.dumps(part).encode()).hexdigest()[:8] for part in _model(spec))


def _verdict(config: Mapping[str, Any]) -> str:
    try:
        return _digest(ModelSpec.from_config(config))
    except RaymoeError as error:
        return f"{type(error).__name__}: {error}"


def _verdicts(count: int) -> Iterator[str]:
    chosen, models = random.Random(0), list(configurations())
    for _ in range(count):
        name, config = chosen.choice(models)
        field, value = chosen.choice(sorted(config)), chosen.choice(CHANGES)
        yield f"{name} {field}={value!r}: {_verdict({**config, field: value})}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verdicts", type=int, default=0)
    count = parser.parse_args().verdicts
    lines = _verdicts(count) if count else (f"{n}: {_verdict(c)}" for n, c in configurations())
    for line in lines:
        print(line, flush=True)
