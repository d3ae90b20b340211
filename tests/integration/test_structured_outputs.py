"""Structured outputs on a tiny random model: what comes out fits, what cannot is an error row."""

import json

import jsonschema
import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from raymoe.config import EngineConfig
from raymoe.data.generator import MoEGenerator
from raymoe.engine.engine import Engine
from tests.hostile_forms import exploding_outputs, malformed_outputs, slow_outputs
from tests.schemas import SchemaMaker
from tests.tiny import make_checkpoint

CONFIG = EngineConfig(dtype="float32", linger_s=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return make_checkpoint(directory, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def engine(model):
    with Engine.from_pretrained(model, CONFIG) as engine:
        yield engine


def structured(outputs, **more):
    return {"max_tokens": 1500, "temperature": 1.0, "structured_outputs": outputs} | more


@pytest.mark.parametrize("count", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_random_schemas_give_only_valid_json(engine, count):
    schemas = [SchemaMaker(seed).make() for seed in range(count)]
    params = [
        structured(
            {"json": schema, "disable_any_whitespace": index % 2 == 0}, temperature=index % 3 / 2
        )
        for index, schema in enumerate(schemas)
    ]
    generations = engine.generate(["Write JSON."] * count, params)
    for schema, generation in zip(schemas, generations, strict=True):
        assert generation.error == "", schema
        assert generation.finish_reason == "stop"
        value = json.loads(generation.text)
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("num_rounds", "num_plain"), [(1, 30), pytest.param(10, 1000, marks=pytest.mark.slow)]
)
def test_hostile_forms_end_as_error_rows_and_plain_rows_have_their_own_tokens(
    engine, model, num_rounds, num_plain
):
    malformed = [outputs for outputs, _ in malformed_outputs()[-3:]]
    hostile = [
        outputs
        for variant in range(num_rounds)
        for outputs in (exploding_outputs(variant)[0], slow_outputs(variant)[0], *malformed)
    ]
    plain = {"max_tokens": 12, "temperature": 1.0}
    prompts = [f"row {i}" for i in range(num_plain)]
    alone = engine.generate(prompts, plain)
    # The slow ones end with "@": a bias against it keeps them going.
    bias = {AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("@"): -100.0}
    forms = [structured(outputs, logit_bias=bias) for outputs in hostile]
    together = engine.generate(prompts + ["x"] * len(forms), [plain] * num_plain + forms)
    assert [g.token_ids for g in together[:num_plain]] == [g.token_ids for g in alone]
    for outputs, generation in zip(hostile, together[num_plain:], strict=True):
        assert generation.finish_reason == "error", outputs
        assert "structured_outputs" in generation.error


@pytest.mark.slow
def test_rows_of_a_table_bring_their_own_forms(model):
    schema = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}
    schema["additionalProperties"] = False
    text = json.dumps({"structured_outputs": {"json": schema, "disable_any_whitespace": True}})
    table = pa.table({"prompt": ["x"] * 3, "sampling_params": ["", text, '{"n": 1}']})
    structs = [
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"structured_outputs": {"json": None, "choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "(a"}},
    ]
    generator = MoEGenerator(model, sampling_params={"max_tokens": 40}, engine_config=CONFIG)
    try:
        texts = generator(table).column("generated_text").to_pylist()
        assert texts[1] == '{"a":null}'
        out = generator(pa.table({"prompt": ["x"] * 3, "sampling_params": structs}))
    finally:
        generator.close()
    assert out.column("generated_text").to_pylist()[1] in ("yes", "no")
    error = out.column("__inference_error__").to_pylist()[2]
    assert error.startswith("ConfigError: column 'sampling_params': structured_outputs has a regex")
