"""`raymoe.generate` and `build_processor`, with the classes of ray.data.llm as the reference."""

import dataclasses
import inspect
import re
import warnings
from importlib import util
from pathlib import Path

import pytest
import ray

import raymoe
from raymoe import ConfigError, MoEEngineProcessorConfig, build_processor
from raymoe.download.hub import HubModel
from raymoe.download.models import open_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's, about pydantic
    from ray.data import llm

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore:Use 'expr' instead of 'fn':UserWarning"),
]
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_generates_filters_judges_and_groups(local_ray) -> None:
    path = ROOT / "examples" / "generate_and_judge.py"
    spec = util.spec_from_file_location("generate_and_judge", path)
    example = util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rows = [{"id": i, "topic": f"t{i % 3}", "prompt": f"date: {i} May 2021 ->"} for i in range(12)]
    rows[5]["prompt"] = ""  # an error row, which the filter drops
    model = raymoe.demo_model_path()
    judged = example.pipeline(ray.data.from_items(rows), model, model, verdicts=["good"])
    counts = {row["topic"]: row["count()"] for row in judged.take_all()}
    assert counts == {"t0": 4, "t1": 4, "t2": 3}


@pytest.mark.slow
def test_a_second_generator_says_before_the_first_runs_that_columns_collide(local_ray) -> None:
    model, runs = raymoe.demo_model_path(), []
    rows = ray.data.from_items([{"prompt": "a", "id": i} for i in range(4)])
    taken = ray.data.from_items([{"continuation": "a", "logprob": 1.0}])
    with pytest.raises(ConfigError, match="names of output columns: logprob;"):
        raymoe.generate(taken, model, task="score")
    first = raymoe.generate(rows, model, max_tokens=4, num_generators=2)
    for same in (first, first.filter(lambda _: runs.append(1) or True), first.limit(2).sort("id")):
        with pytest.raises(ConfigError, match=r"generated_text.*set column_prefix"):
            raymoe.generate(same, model, max_tokens=4, num_generators=2)
    named = raymoe.generate(first, model, max_tokens=4, num_generators=2, column_prefix="judge_")
    with pytest.raises(ConfigError, match="judge_generated_text"):
        raymoe.map_batches_kwargs(model, ds=named, column_prefix="judge_")
    # What a function returns is not known; it may have dropped the columns.
    raymoe.generate(first.map(lambda row: {"prompt": row["id"]}), model, num_generators=2)
    assert not runs


@pytest.mark.slow
def test_prompts_come_from_templates_and_judges_read_answers(local_ray, tmp_path) -> None:
    model = raymoe.demo_model_path()
    items = [{"id": i, "day": f"{i}th" if i else None} for i in range(4)]
    rows = ray.data.from_items(items).map(lambda row: row)  # its columns are not known
    with pytest.raises(ConfigError, match="did you mean 'day'"):
        raymoe.generate(rows, model, prompt_template="{{ days }}")
    (tmp_path / "p.jinja").write_text("date: {{ day }} March 2024 ->\n")
    options = {"max_tokens": 12, "temperature": 0.0, "num_generators": 2}
    first = raymoe.generate(rows, model, prompt_template=f"@{tmp_path}/p.jinja", **options)
    judged = raymoe.generate(
        first, model, prompt_template="{{ generated_text }}", column_prefix="judge_",
        stop=["-"], **options,
    )  # fmt: skip
    found = {row["id"]: row for row in judged.take_all()}
    assert found[3]["rendered_prompt"] == "date: 3th March 2024 ->"
    assert found[3]["generated_text"] == found[3]["judge_rendered_prompt"] == "2024-03-03"
    assert "column 'day' is null" in found[0]["__inference_error__"]
    assert "the prompt is empty" in found[0]["judge___inference_error__"]
    assert "__input_error__" not in found[3]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prompt_template": "{{ x", "max_tokens": 3}, "prompt_template is no Jinja template"),
        ({"prompt_template": "{{ x }}", "prompt_column": "x"}, "contradict each other"),
        ({"system_prompt": 3}, "system_prompt is a int"),
        ({"json_schema": "/nowhere.json"}, "json_schema /nowhere.json: cannot be read"),
        ({"json_schema": {}, "structured_outputs": {"choice": ["a"]}}, "contradict each other"),
        ({"retry_errors": True}, "retry_errors needs a journal_dir"),
        ({"limit": 3}, "unknown option 'limit'; the first rows are ds.limit"),
    ],
)
def test_options_of_prompts_and_answers_are_refused_at_once(local_ray, options, reason) -> None:
    rows = ray.data.from_items([{"x": "a", "prompt": "b"}])
    with pytest.raises(ConfigError, match=reason):
        raymoe.generate(rows, raymoe.demo_model_path(), **options)


def user_code(config_class, build, model):
    """What somebody wrote for ray.data.llm; nothing but the import differs."""
    config = config_class(
        model_source=str(model),
        engine_kwargs={"enable_prefix_caching": True, "max_num_batched_tokens": 4096},
        concurrency=1,
        batch_size=64,
        chat_template_stage=False,
        should_continue_on_error=True,
    )
    return build(
        config,
        preprocess=lambda row: {
            "prompt": row["text"],
            "sampling_params": {"temperature": 0.0, "max_tokens": 12, "detokenize": False},
        },
        postprocess=lambda row: {"answer": row["generated_text"], "id": row["id"]},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "config_class",
    [
        pytest.param(MoEEngineProcessorConfig, id="ours"),
        pytest.param(llm.vLLMEngineProcessorConfig, id="rays"),
    ],
)
def test_code_for_ray_data_llm_runs_with_another_import(local_ray, config_class) -> None:
    rows = [{"id": i, "text": f"date: {i} May 2021 ->" if i != 3 else ""} for i in range(1, 8)]
    rows = [row | {"generated_text": "of an earlier stage"} for row in rows]
    processor = user_code(config_class, build_processor, raymoe.demo_model_path())
    out = {row["id"]: row for row in processor(ray.data.from_items(rows)).take_all()}
    assert sorted(out) == list(range(1, 8))
    assert "is empty" in out.pop(3)["__inference_error__"]  # as it was, without postprocess
    assert out[7]["answer"].strip() == "2021-05-07"
    assert {row["__inference_error__"] for row in out.values()} == {""}


def test_fields_defaults_and_arguments_are_those_of_ray() -> None:
    theirs = llm.vLLMEngineProcessorConfig(model_source="m")
    ours = MoEEngineProcessorConfig(model_source="m")
    names = [field.name for field in dataclasses.fields(ours)]
    assert sorted(names) == sorted(type(theirs).model_fields)
    # Theirs has got the task's type; ours are as many as the cluster has room for.
    for name in set(names) - {"engine_kwargs", "concurrency"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.engine_kwargs == {}
    parameters = inspect.signature(llm.build_processor).parameters
    found = inspect.signature(build_processor).parameters
    assert list(found) == list(parameters)
    assert all(found[name].default == parameters[name].default for name in parameters)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dynamic_lora_loading_path": "s3://x"}, "dynamic_lora_loading_path has no meaning"),
        ({"prepare_multimodal_stage": True}, "prepare_multimodal_stage has no meaning"),
        ({"task_type": "rank"}, "task_type is 'rank'"),
        ({"tokenize_stage": {"model_source": "n"}}, "tokenize_stage has model_source='n'"),
        ({"chat_template_stage": 3}, "chat_template_stage is 3"),
        ({"chat_template_stage": {"chat_template": "{{ x }}"}}, "the file chat_template.jinja of"),
        ({"detokenize_stage": {"wrong": 2}}, "leave wrong out"),
        ({"concurrency": (3, 2)}, "concurrency is"),
        ({"engine_kwargs": {"kv_cache_dtype": "fp8"}}, "kv_cache_dtype='fp8'; raymoe takes only"),
        ({"engine_kwargs": {"tokenizer": "other/one"}}, "tokenizer='other/one'; raymoe takes that"),
        (
            {"engine_kwargs": {"enable_lora": True}},
            "enable_lora=True, for adapters (LoRA) of single",
        ),
        ({"engine_kwargs": {"revision": "v1", "tokenizer_revision": "v2"}}, "at one revision"),
        (
            {"engine_kwargs": {"revision": "v1"}, "model_source": "s3://m/m"},
            "only a model of the hub",
        ),
        ({"engine_kwargs": {"hf_overrides": {"a": 1}}}, "and that is not known here"),
        ({"has_image": True}, "prepare_multimodal_stage has no meaning"),
        ({"chat_template": "{{ x }}"}, "the file chat_template.jinja of"),
        ({"engine_kwargs": {"mamba_ssm_cache_dtype": "half"}}, "state_dtype is 'float16'"),
        ({"engine_kwargs": {"tensor_paralel_size": 2}}, "did you mean 'tensor_parallel_size'"),
    ],
)
def test_what_has_no_meaning_is_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_processor(MoEEngineProcessorConfig(**{"model_source": "m"} | fields))


def test_options_that_do_not_exist_are_refused_when_the_processor_is_built() -> None:
    config = MoEEngineProcessorConfig(model_source="m")
    with pytest.raises(ConfigError, match="did you mean 'num_actors'"):
        build_processor(config, builder_kwargs={"num_actor": 2})
    with pytest.raises(ConfigError, match=r"belongs to sampling_params: give sampling_params="):
        build_processor(config, builder_kwargs={"max_tokens": 2})
    build_processor(config, builder_kwargs={"num_cpus": 1, "id_column": "id"})


MISSING = [
    ({}, r"no column 'messages' exists; the rows have 'text', 'prompt'; return it from preprocess, "
     "or give chat_template_stage=False"),
    ({"chat_template_stage": False}, r"no column 'prompt' exists; the rows have 'text', 'other'; "
     "return it from preprocess, or leave out chat_template_stage=False"),
    ({"chat_template_stage": False, "tokenize_stage": False},
     "no column 'tokenized_prompt' exists"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), MISSING)
def test_what_preprocess_does_not_return_is_named_before_an_actor_starts(
    local_ray, fields, message
) -> None:
    config = MoEEngineProcessorConfig(model_source=str(raymoe.demo_model_path()), **fields)
    name = "other" if fields else "prompt"
    processor = build_processor(config, preprocess=lambda row: {name: row["text"]})
    with pytest.raises(ConfigError, match=message):
        processor(ray.data.from_items([{"text": "a"}]))


def test_arguments_of_vllm_become_those_of_the_engine() -> None:
    config = MoEEngineProcessorConfig(
        model_source="m",
        engine_kwargs={"dtype": "half", "max_model_len": 512, "gpu_memory_utilization": 0.9},
        concurrency=(2, 5),
        max_concurrent_batches=4,
        max_pending_requests=77,
        chat_template_stage={"chat_template_kwargs": {"enable_thinking": False}},
    )
    options = build_processor(config, builder_kwargs={"id_column": "id"}).operator_kwargs
    engine = options["engine_config"]
    assert (engine.dtype, engine.max_model_len, engine.max_queued_rows) == ("float16", 512, 77)
    assert (options["min_actors"], options["num_actors"]) == (2, 5)
    for unsaid in (MoEEngineProcessorConfig, llm.vLLMEngineProcessorConfig):
        assert "num_actors" not in build_processor(unsaid(model_source="m")).operator_kwargs
    one = llm.vLLMEngineProcessorConfig(model_source="m", concurrency=1)
    assert build_processor(one).operator_kwargs["num_actors"] == 1
    three = build_processor(llm.vLLMEngineProcessorConfig(model_source="m", concurrency=3))
    assert (three.operator_kwargs["min_actors"], three.operator_kwargs["num_actors"]) == (1, 3)
    assert (options["rows_in_flight"], options["id_column"]) == (128, "id")
    assert options["chat_template_kwargs"] == {"enable_thinking": False}


def test_permissions_and_placement_of_vllm_are_taken(caplog) -> None:
    """What many scripts for ray.data.llm give, and what says nothing of answers."""
    model = str(raymoe.demo_model_path())
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        log_engine_metrics=False,
        tokenize_stage={"num_cpus": 2, "concurrency": 4},
        engine_kwargs={
            "trust_remote_code": True, "disable_log_requests": True, "tokenizer": model, "seed": 3,
            "enable_chunked_prefill": False, "enable_prefix_caching": False,
            "enable_expert_parallel": True, "structured_outputs_config": {"backend": "xgrammar"},
        },
        placement_group_config={"bundles": [{"CPU": 3, "GPU": 0}], "strategy": "PACK"},
    )  # fmt: skip
    options = build_processor(config).operator_kwargs
    assert options["engine_config"] == raymoe.EngineConfig(seed=3)
    assert (options["num_cpus"], options["num_gpus"]) == (3, 0)
    stage, warned = [one.message for one in caplog.records if one.name.startswith("raymoe")]
    assert stage.startswith("tokenize_stage has num_cpus=2, concurrency=4, without effect")
    assert "enable_expert_parallel=True" in warned
    assert "trust_remote_code" not in warned
    with pytest.raises(ConfigError, match="quantization='fp8', but the model is not quantised"):
        build_processor(MoEEngineProcessorConfig(
            model_source=model, engine_kwargs={"quantization": "fp8"}
        ))  # fmt: skip


def test_names_of_an_older_ray_are_those_of_its_stages_now() -> None:
    config = MoEEngineProcessorConfig(
        model_source="m", apply_chat_template=False, tokenize=False, detokenize=False,
        has_image=False, resources_per_bundle={"CPU": 2, "NPU": 1},
        experimental={"max_tasks_in_flight_per_actor": 16},
    )  # fmt: skip
    options = build_processor(config).operator_kwargs
    assert options["prompt_column"] == "tokenized_prompt"
    assert (options["num_cpus"], options["resources"]) == (2, {"NPU": 1})
    assert "num_gpus" not in options
    assert config.max_tasks_in_flight_per_actor == 16


def test_a_field_of_a_newer_ray_is_refused_where_it_is_set() -> None:
    class Newer(llm.vLLMEngineProcessorConfig):
        synchronous_engine: bool = False

    build_processor(Newer(model_source="m"))
    with pytest.raises(ConfigError, match="config has synchronous_engine=True, which raymoe does"):
        build_processor(Newer(model_source="m", synchronous_engine=True))


def test_what_is_said_of_a_model_must_be_in_its_files() -> None:
    def build(overrides):
        options = {"model_source": str(raymoe.demo_model_path())}
        options["engine_kwargs"] = {"hf_overrides": overrides}
        return build_processor(MoEEngineProcessorConfig(**options))

    build({"num_local_experts": 8, "rope_parameters": {"rope_theta": 10000.0}})
    with pytest.raises(
        ConfigError, match=r"rope_parameters.rope_theta=5.0, but config.json of the"
    ):
        build({"rope_parameters": {"rope_theta": 5.0}})
    with pytest.raises(ConfigError, match="hf_overrides of the type function"):
        build(lambda config: config)
    hub = {"model_source": "org/name", "engine_kwargs": {"revision": "refs/pr/1"}}
    processor = build_processor(MoEEngineProcessorConfig(**hub))
    assert processor.model_source == "hf://org/name@refs%2Fpr%2F1"
    assert open_model(processor.model_source) == HubModel("org/name", "refs/pr/1")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"model": "adapters/one"},
            "model='adapters/one', for which ray.data.llm loads an adapter",
        ),
        (
            {"pooling_params": {"dimensions": 64}},
            "pooling_params={'dimensions': 64}; give task_opt",
        ),
        ({"tokenization_kwargs": {"max_length": 9}}, "give max_model_len and on_too_long"),
        ({"multimodal_data": {"image": [1]}}, "raymoe takes text"),
    ],
)
def test_what_rays_engine_reads_of_a_row_and_ours_does_not_is_refused(row, message) -> None:
    processor = build_processor(MoEEngineProcessorConfig(model_source="m"))
    with pytest.raises(ConfigError, match=re.escape(message)):
        processor._before(lambda _: row, {"prompt": "a"})
    harmless = {"model": "m", "pooling_params": {"truncate_prompt_tokens": -1, "dimensions": None}}
    assert processor._before(lambda _: harmless, {"id": 1}) == {"id": 1, **harmless}


def test_functions_that_return_no_dict_are_named() -> None:
    processor = build_processor(MoEEngineProcessorConfig(model_source="m"))

    def several(row):
        yield row

    with pytest.raises(TypeError, match="preprocess returned a generator; it returns a dict"):
        processor._before(several, {"prompt": "a"})
    row = {"__inference_error__": "", "__request__": None}
    with pytest.raises(TypeError, match="postprocess returned a NoneType; it returns a dict"):
        processor._after(lambda _: None, row)


@pytest.mark.slow
def test_rows_are_embedded_by_the_task_of_the_configuration(local_ray) -> None:
    config = llm.vLLMEngineProcessorConfig(
        model_source=str(raymoe.demo_model_path()), task_type="embed", chat_template_stage=False
    )
    processor = build_processor(config, postprocess=lambda row: {"vector": row["embeddings"]})
    rows = processor(ray.data.from_items([{"prompt": "a date"}, {"prompt": "a name"}])).take_all()
    assert {len(row["vector"]) for row in rows} == {160}
    assert all(abs(sum(x * x for x in row["vector"]) - 1) < 1e-3 for row in rows)
