"""The operator without Ray: one row out for each row in, called by many threads."""

import logging
import threading

import pyarrow as pa
import pytest

from raymoe.config import EngineConfig
from raymoe.data.columns import explode_samples
from raymoe.data.generator import MoEGenerator
from raymoe.data.request_column import as_in_ray
from raymoe.errors import ConfigError, ExecutionError
from tests.tiny import make_checkpoint

CONFIG = {"host_memory_bytes": 3 * 2**30, "dtype": "float32"}
PARAMS = {"max_tokens": 5, "temperature": 0.0}
ADDED = [
    ("generated_text", pa.string()),
    ("generated_tokens", pa.list_(pa.int32())),
    ("num_input_tokens", pa.int32()),
    ("num_cached_tokens", pa.int32()),
    ("num_generated_tokens", pa.int32()),
    ("finish_reason", pa.string()),
    ("__inference_error__", pa.string()),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def generator(model):
    generator = MoEGenerator(model, sampling_params=PARAMS, engine_config=CONFIG)
    yield generator
    generator.close()


def make(model, **options):
    return MoEGenerator(model, **{"sampling_params": PARAMS, "engine_config": CONFIG, **options})


def test_input_columns_are_kept_and_the_schema_is_always_the_same(generator):
    table = pa.table({"prompt": ["a", None], "other": [{"x": 1}, None]})
    expected = pa.schema([*table.schema, *(pa.field(*added) for added in ADDED)])
    for batch in (table, table.slice(1), table.slice(0, 0)):
        out = generator(batch)
        assert out.schema == expected
        assert out.select(["prompt", "other"]) == batch


def test_a_row_gives_the_same_tokens_alone_and_among_others(generator):
    prompts = [f"prompt {index}" * (index % 5 + 1) for index in range(40)]
    together = generator(pa.table({"prompt": prompts})).column("generated_tokens").to_pylist()
    for index in (0, 7, 39):
        alone = generator(pa.table({"prompt": [prompts[index]]}))
        assert alone.column("generated_tokens").to_pylist() == [together[index]]


def test_many_threads_get_their_own_rows(generator):
    answers = {}

    def call(number):
        prompts = [f"{number} {index}" for index in range(4)]
        answers[number] = generator(pa.table({"prompt": prompts, "id": [number] * 4}))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, table in answers.items():
        assert table.column("id").to_pylist() == [number] * 4
        again = generator(table.select(["prompt", "id"]))
        assert again == table


def test_an_error_of_the_engine_names_the_column(generator, caplog):
    table = pa.table(
        {
            "prompt": ["x" * 600, "a", "fine"],
            "sampling_params": [None, '{"logit_bias": {"100000": 1}}', None],
        }
    )
    with caplog.at_level(logging.INFO, "raymoe.data.generator"):
        long, bias, fine = generator(table).column("__inference_error__").to_pylist()
        generator(table)  # nothing new
    assert long.startswith("ConfigError: column 'prompt': the prompt has 601 tokens")
    assert bias.startswith("ConfigError: column 'sampling_params': logit_bias has token 100000")
    assert fine == ""
    rows = [record.row for record in caplog.records]  # of which Ray's logs in JSON make a field
    assert rows == ["number 0 of its batch", "number 1 of its batch"]
    assert "has token 100000" in caplog.records[1].message


def test_chat_messages_are_rendered_by_the_template_of_the_model(generator):
    chat = [{"role": "user", "content": "hi"}]
    out = generator(pa.table({"messages": [chat]}))
    assert out.column("num_input_tokens").to_pylist() == [len("<user: hi\nassistant: ")]


def test_long_prompts_are_cut_when_the_operator_says_so(model):
    generator = make(model, on_too_long="truncate_left")
    try:
        out = generator(pa.table({"prompt": ["x" * 600]}))
        assert out.column("__inference_error__").to_pylist() == [""]
        assert out.column("num_input_tokens").to_pylist() == [512 - 5]
    finally:
        generator.close()


def test_samples_and_log_probabilities_get_columns_when_turned_on(model):
    params = {"max_tokens": 3, "n": 2, "logprobs": 2, "prompt_logprobs": 0, "seed": 1}
    generator = make(model, sampling_params=params)
    try:
        out = generator(pa.table({"prompt": ["abc", None]}))
    finally:
        generator.close()
    good, bad = out.to_pylist()
    assert len(good["generated_texts"]) == 2
    assert good["generated_texts"][0] == good["generated_text"]
    assert [one["token_id"] for one in good["logprobs"]] == good["generated_tokens"]
    assert all(len(one["top"]) == 2 for one in good["logprobs"])
    assert good["prompt_logprobs"][0] is None
    assert len(good["prompt_logprobs"]) == good["num_input_tokens"] == 4
    assert bad["logprobs"] is None
    assert bad["generated_texts"] == [""]


def test_rows_ask_for_samples_on_their_own_where_there_is_a_column_for_them(model):
    params = [{"n": 3, "logprobs": 1}, None, {"prompt_logprobs": 1}]
    table = pa.table({"prompt": ["abc"] * 3, "sampling_params": params})
    generator = make(model, has_choices=True)
    try:
        many, one, refused = generator(table).to_pylist()
    finally:
        generator.close()
    assert [len(row["choices"]) for row in (many, one)] == [3, 1]
    assert many["choices"][0]["text"] == many["generated_text"]
    assert all(len(choice["logprobs"]) == 5 for choice in many["choices"])
    assert one["choices"][0]["logprobs"] is None
    assert "asks for prompt_logprobs" in refused["__inference_error__"]


def test_tools_are_refused_row_by_row_by_a_template_without_them(model):
    chat = [{"role": "user", "content": "hi"}]
    tools = [None, '[{"type": "function", "function": {"name": "add"}}]', "[1]"]
    generator = make(model, tools_column="tools")
    try:
        out = generator(pa.table({"messages": [chat] * 3, "tools": tools}))
    finally:
        generator.close()
    fine, useless, broken = out.column("__inference_error__").to_pylist()
    assert fine == ""
    assert "column 'messages': the chat template takes no tools" in useless
    assert broken.startswith("ValueError: column 'tools' is [1]")


def test_the_seed_and_the_id_decide_what_is_sampled(model):
    def sample(seed, ids):
        params = {"max_tokens": 12, "temperature": 1.0}
        generator = make(model, sampling_params=params, seed=seed, id_column="id")
        try:
            table = pa.table({"prompt": ["same"] * len(ids), "id": ids})
            return generator(table).column("generated_tokens").to_pylist()
        finally:
            generator.close()

    first = sample(0, ["a", "b", "c"])
    assert sample(0, ["c", "a"]) == [first[2], first[0]]
    assert first[0] != first[1]
    assert sample(1, ["a"]) != first[:1]


def test_the_first_error_row_raises_when_asked(model):
    generator = make(model, should_continue_on_error=False)
    try:
        with pytest.raises(ExecutionError, match=r"row 1 .*column 'prompt' is empty"):
            generator(pa.table({"prompt": ["a", ""]}))
    finally:
        generator.close()


def test_wrong_tables_are_refused(generator, model):
    with pytest.raises(ConfigError, match="the batch is a list; MoEGenerator takes a dict"):
        generator(["a"])
    with pytest.raises(ConfigError, match="names of output columns: generated_text"):
        generator(pa.table({"prompt": ["a"], "generated_text": ["b"]}))
    fresh = make(model, prompt_column="question")
    with pytest.raises(ConfigError, match="neither column 'question' nor 'messages'"):
        fresh(pa.table({"prompt": ["a"]}))
    fresh(pa.table({"question": ["a"]}))
    out = fresh(pa.table({"other": ["a"]}))  # a later block may lack a column that is all null
    assert "is null" in out.column("__inference_error__").to_pylist()[0]
    fresh.close()


def test_generators_of_a_pipeline_name_their_columns(generator, model):
    first = generator(pa.table({"prompt": ["a", ""]}))
    options = {"sampling_params": {"max_tokens": 2, "n": 2}, "has_choices": True}
    with pytest.raises(ConfigError, match="column_prefix is 3"):
        MoEGenerator(model, column_prefix=3)
    judge = MoEGenerator(model, engine_config=CONFIG, column_prefix="judge_", **options)
    second = judge(first)
    with pytest.raises(ConfigError, match="names of output columns: judge___inference_error__"):
        judge(second)
    judge.close()
    added = second.column_names[len(first.column_names) :]
    assert all(name.startswith("judge_") for name in added)
    assert second.select(first.column_names).equals(first)
    exploded = explode_samples(second, column_prefix="judge_")
    assert exploded.column("judge_sample_index").to_pylist() == [0, 1, 0]
    texts = second.column("judge_generated_texts")[0].as_py()
    assert exploded.column("judge_generated_text").to_pylist()[:2] == texts
    assert exploded.column("generated_text")[1] == first.column("generated_text")[0]


def test_a_closed_operator_says_so(model):
    generator = make(model, engine_config=EngineConfig(**CONFIG))
    generator.close()
    generator.close()
    with pytest.raises(ExecutionError, match="closed"):
        generator(pa.table({"prompt": ["a"]}))


def test_a_broken_engine_raises_outside_of_ray(model):
    generator = make(model)
    generator._engine.close()
    with pytest.raises(ExecutionError, match="the engine is broken"):
        generator(pa.table({"prompt": ["a"]}))


def test_unknown_options_are_refused_before_anything_is_loaded(model):
    with pytest.raises(ConfigError, match="did you mean 'max_tokens'"):
        MoEGenerator(model, sampling_params={"max_token": 3})
    with pytest.raises(ConfigError, match="did you mean 'num_threads'"):
        MoEGenerator(model, engine_config={"num_thread": 3})


def test_a_row_says_of_its_request_what_rays_processor_says(model, tmp_path):
    """Also where an earlier run has left the answer, and of rows that cannot be run."""
    chat = [{"role": "user", "content": "hi"}]
    table = pa.table({
        "prompt": [None, "ab", ""],
        "messages": [chat, None, None],
        "sampling_params": [{"logprobs": 2, "n": None}, {"logprobs": None, "n": 2}, None],
    })  # fmt: skip
    generator = make(model, has_request=True, journal_dir=tmp_path)
    try:
        rows = [as_in_ray(row) for row in generator(table).to_pylist()]
        second = [as_in_ray(row) for row in generator(table).to_pylist()]
    finally:
        generator.close()
    first, plain, failed = rows
    assert first["prompt"] == "<s>user: hi\nassistant: "
    assert (plain["prompt"], len(plain["prompt_token_ids"])) == ("ab", 3)
    for row in (first, plain):
        assert row["num_input_tokens"] == len(row["prompt_token_ids"])
        assert (
            row["time_taken_llm"] == row["metrics"]["last_token_ts"] - row["metrics"]["queued_ts"]
        )
        assert row["metrics"]["num_generation_tokens"] == row["num_generated_tokens"] == 5
        assert row["params"].startswith("SamplingParams(max_tokens=5")
        assert row["embeddings"] is row["prompt_logprobs"] is None
    assert plain["logprobs"] is None  # and its second sample is dropped
    for token, candidates in zip(first["generated_tokens"], first["logprobs"], strict=True):
        assert next(iter(candidates)) == token
        assert [one["rank"] for one in candidates.values()] == [1, 2]
        assert candidates[token]["decoded_token"] is not None
    assert (failed["request_id"], failed["time_taken_llm"], failed["params"]) == (-1, -1, "")
    assert [row["request_id"] for row in second] == [2, 3, -1]
    own = ("request_id", "batch_uuid")
    for row, again in zip(rows, second, strict=True):  # from the journal
        assert {**row, **dict.fromkeys(own)} == {**again, **dict.fromkeys(own)}
    assert len({row["batch_uuid"] for row in rows}) == 1
    with pytest.raises(KeyError, match="'first_token_ts' is not among the metrics"):
        first["metrics"]["first_token_ts"]
