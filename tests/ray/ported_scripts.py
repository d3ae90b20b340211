"""Scripts as people write them for ray.data.llm, each in the form of a public one.

`llm` and `data` are what they import from, ray.data.llm and ray.data; `model` is a directory.
Each returns the dataset that it writes.
"""
# ruff: noqa: C408 - as people write them

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pydantic

Script = Callable[[Any, Any, str, Path], Any]
SCRIPTS: dict[str, Script] = {}
REFUSED: dict[str, tuple[Script, str]] = {}


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


def refused(reason: str) -> Callable[[Script], Script]:
    def add(function: Script) -> Script:
        REFUSED[function.__name__] = (function, reason)
        return function

    return add


DATES = [{"id": i, "prompt": f"date: {i} May 2021 ->"} for i in range(1, 6)]
SAMPLING = {"temperature": 0.0, "max_tokens": 12}


def asked(text: str, system: str | None = None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


@script
def quickstart(llm, data, model, _path):
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        concurrency=1,
        batch_size=8,
        engine_kwargs={"enforce_eager": True, "max_model_len": 256},
    )
    processor = llm.build_processor(
        config,
        preprocess=lambda row: {
            "messages": asked(row["prompt"]),
            "sampling_params": SAMPLING,
        },
        postprocess=lambda row: {"prompt": row["prompt"], "response": row["generated_text"]},
    )
    return processor(data.from_items(DATES))


@script
def disaggregated_tokenization(llm, data, model, _path):
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={"max_model_len": 256},
        concurrency=1,
        batch_size=64,
        tokenize_stage=True,
        detokenize_stage=True,
    )
    processor = llm.build_processor(
        config,
        preprocess=lambda row: dict(
            messages=asked(row["item"]),
            sampling_params=dict(temperature=0.0, max_tokens=16, detokenize=False),
        ),
        postprocess=lambda row: dict(resp=row["generated_text"]),
    )
    return processor(data.from_items(["date: 3 May 2021 ->", "amount: EUR 3,50 ->"]))


class Explained(pydantic.BaseModel):
    problem: str = pydantic.Field(max_length=4)
    answer: int = pydantic.Field(ge=0, le=99)


@script
def structured_output(llm, data, model, _path):
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=dict(guided_decoding_backend="xgrammar", dtype="half", max_model_len=256),
        batch_size=16,
        concurrency=1,
    )
    schema = Explained.model_json_schema()
    processor = llm.build_processor(
        config,
        preprocess=lambda row: dict(
            messages=asked(f"3 * {row['id']} + 5 = ?", "Answer in JSON"),
            sampling_params=dict(
                temperature=0.0, max_tokens=80, detokenize=False, guided_decoding=dict(json=schema)
            ),
        ),
        postprocess=lambda row: {"resp": row["generated_text"]},
    )
    return processor(data.range(4)).materialize()


@script
def synthetic_questions(llm, data, model, path):
    """With the later name of structured outputs, a prompt of its own, and rows to flatten."""
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={
            "max_model_len": 256, "max_num_batched_tokens": 8192, "trust_remote_code": True,
            "structured_outputs_config": {"backend": "guidance"},
        },
        concurrency=1,
        batch_size=16,
    )  # fmt: skip
    choices = ["question", "answer"]
    processor = llm.build_processor(
        config,
        preprocess=lambda row: {
            "messages": asked(row["prompt"], "You write questions"),
            "sampling_params": {
                "temperature": 0.0, "max_tokens": 20, "structured_outputs": {"choice": choices},
            },
            "title": f"t{row['id']}",
        },
        postprocess=lambda row: {"pairs": [row["generated_text"], row["title"]]},
    )  # fmt: skip
    pairs = processor(data.from_items(DATES))
    pairs = pairs.flat_map(lambda row: [{"text": text} for text in row["pairs"]])
    pairs.write_parquet(str(path))
    return data.read_parquet(str(path))


@script
def embeddings(llm, data, model, _path):
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        task_type="embed",
        engine_kwargs=dict(
            enable_prefix_caching=False, enable_chunked_prefill=False, max_model_len=256,
            enforce_eager=True,
        ),
        batch_size=32,
        concurrency=1,
        apply_chat_template=False,
        detokenize=False,
    )  # fmt: skip
    processor = llm.build_processor(
        config,
        preprocess=lambda row: dict(prompt=row["text"]),
        postprocess=lambda row: {
            "text": row["prompt"],
            "length": len(row["embeddings"]),
            "norm": round(sum(x * x for x in row["embeddings"]), 2),
        },
    )
    return processor(data.from_items([{"text": t} for t in ("Hello world", "A sentence")]))


@script
def embedded_chunks(llm, data, model, _path):
    """A chain of document chunks; preprocess changes the row itself."""

    def before(row):
        row["prompt"] = row["text"]
        row["begin_s"] = 1.0
        return row

    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        task_type="embed",
        batch_size=16,
        concurrency=(1, 1),
        engine_kwargs={"max_model_len": 256},
        tokenize_stage={"enabled": False},
        detokenize_stage={"enabled": False},
        chat_template_stage={"enabled": False},
    )
    processor = llm.build_processor(
        config,
        preprocess=before,
        postprocess=lambda row: dict(
            text=row["text"],
            chunk_index=row["chunk_index"],
            size=len(row.get("embeddings") or ()),
            took_s=row["begin_s"],
        ),
    )
    return processor(data.from_items([{"text": "ab", "chunk_index": i} for i in range(3)]))


@script
def classification(llm, data, model, _path):
    """`model` is replaced by a classifier."""
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        task_type="classify",
        engine_kwargs=dict(max_model_len=256, enforce_eager=True),
        batch_size=8,
        concurrency=1,
        apply_chat_template=False,
        detokenize=False,
    )
    processor = llm.build_processor(
        config,
        preprocess=lambda row: dict(prompt=row["text"]),
        postprocess=lambda row: {
            "text": row["prompt"],
            "score": float(row["embeddings"][0])
            if row.get("embeddings") is not None and len(row["embeddings"]) > 0
            else None,
        },
    )
    return processor(data.from_items([{"text": "abc"}, {"text": "light into energy"}]))


@script
def classified_tokens(llm, data, model, _path):
    """As a benchmark does it: token ids, typed stages, and `pooling_params`."""
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=dict(enforce_eager=True, max_model_len=256),
        task_type="classify",
        batch_size=16,
        concurrency=1,
        chat_template_stage=llm.ChatTemplateStageConfig(enabled=False),
        tokenize_stage=llm.TokenizerStageConfig(enabled=False),
        detokenize_stage=llm.DetokenizeStageConfig(enabled=False),
    )
    processor = llm.build_processor(
        config,
        preprocess=lambda row: dict(
            prompt=row["prompt"],
            tokenized_prompt=row["input_ids"],
            pooling_params={"truncate_prompt_tokens": -1},
        ),
        postprocess=lambda row: {"prompt": row["prompt"], "prob": float(row["embeddings"][0])},
    )
    rows = [{"prompt": "x" * i, "input_ids": [5 + i] * i} for i in range(1, 4)]
    return processor(data.from_items(rows))


@script
def haikus_of_a_file(llm, data, model, path):
    """That of vLLM's own repository: a text file, and all columns in the output."""
    (path / "prompts.txt").write_text("".join(f"{row['prompt']}\n" for row in DATES))
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={
            "enable_chunked_prefill": True, "max_num_batched_tokens": 4096, "max_model_len": 256,
        },
        concurrency=1,
        batch_size=64,
    )  # fmt: skip
    processor = llm.build_processor(
        config,
        preprocess=lambda row: dict(
            messages=asked(row["text"], "You complete haikus"),
            sampling_params=dict(temperature=0.0, max_tokens=20),
        ),
        postprocess=lambda row: dict(answer=row["generated_text"], **row),
    )
    rows = processor(data.read_text(str(path / "prompts.txt"))).take(limit=10)
    return data.from_items(
        [{"prompt": r["prompt"], "generated_text": r["generated_text"], "names": sorted(r)}
         for r in rows]
    )  # fmt: skip


@script
def short_answers_as_json(llm, data, model, path):
    config = llm.vLLMEngineProcessorConfig(
        model_source=model, engine_kwargs={"max_model_len": 256}, concurrency=1, batch_size=32
    )
    processor = llm.build_processor(
        config,
        preprocess=lambda row: dict(
            messages=asked(row["prompt"], "You write short answers."), sampling_params=SAMPLING
        ),
        postprocess=lambda row: {"out": row["generated_text"], **row},
    )
    processor(data.from_items(DATES)).write_json(str(path))
    found = data.read_json(str(path))
    return found.select_columns(["out", "id", "prompt", "num_input_tokens", "generated_tokens"])


@script
def haikus_on_other_chips(llm, data, model, _path):
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={
            "tensor_parallel_size": 1, "max_num_batched_tokens": 256, "max_model_len": 256,
        },
        placement_group_config={"bundles": [{"TPU": 1, "CPU": 1, "GPU": 0}]},
        concurrency=1,
        batch_size=1,
    )  # fmt: skip
    processor = llm.build_processor(
        config,
        preprocess=lambda row: dict(
            messages=asked(row["item"], "You answer with haikus."),
            sampling_params=dict(temperature=0, max_tokens=25),
        ),
        postprocess=lambda row: dict(answer=row["generated_text"], **row),
    )
    return processor(data.from_items(["date: 3 May 2021 ->"])).select_columns(["answer"])


@script
def benchmark_of_a_cluster(llm, data, model, _path):
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={"tensor_parallel_size": 1, "trust_remote_code": True},
        concurrency=1,
        batch_size=64,
    )
    processor = llm.build_processor(
        config,
        preprocess=lambda row: {
            "messages": asked(row["prompt"]),
            "sampling_params": {"temperature": 0.0, "top_p": 0.95, "max_tokens": 9},
        },
        postprocess=lambda row: {
            "prompt": row["prompt"],
            "generated_text": row["generated_text"],
            "num_input_tokens": row["num_input_tokens"],
            "num_output_tokens": row["num_generated_tokens"],
        },
    )
    return processor(data.from_items(DATES))


@script
def dates_of_customers(llm, data, model, path):
    """A template of Anyscale's: a table, blocks of its own, an accelerator."""
    table = pd.DataFrame({"Customer": ["a", "b", "c"], "Subscribed": ["3 May 2021"] * 3})
    table.to_csv(path / "customers.csv")
    dataset = data.read_csv(str(path / "customers.csv")).limit(1000).repartition(num_blocks=4)
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=dict(max_model_len=256, max_num_batched_tokens=65536, max_num_seqs=1024),
        batch_size=256,
        accelerator_type="L4",
        concurrency=4,
    )

    def preprocess(row):
        return dict(
            messages=asked(f"date: {row['Subscribed']} ->", "You format dates."),
            sampling_params=dict(temperature=0, max_tokens=32),
        )

    processor = llm.build_processor(
        config,
        preprocess=preprocess,
        postprocess=lambda row: {"formatted_date": row["generated_text"], **row},
    )
    found = processor(dataset).materialize()
    return found.select_columns(["formatted_date", "Customer"])


@script
def without_functions(llm, data, model, path):
    """Rows that are requests already, and no function at all."""
    data.from_items(DATES).write_parquet(str(path))
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=dict(enable_prefix_caching=True, max_model_len=256),
        batch_size=16,
        concurrency=1,
    )
    processor = llm.build_processor(config)
    dataset = data.read_parquet(str(path)).map(
        lambda row: {"messages": asked(row["prompt"]), "sampling_params": SAMPLING}
    )
    rows = processor(dataset).take_all()
    return data.from_items([{"text": row["generated_text"], "names": sorted(row)} for row in rows])


@script
def attacks_on_guards(llm, data, model, path):
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={
            "enable_chunked_prefill": True, "max_num_batched_tokens": 4096, "max_model_len": 256,
        },
        concurrency=1,
        batch_size=64,
    )  # fmt: skip
    processor = llm.build_processor(
        config,
        preprocess=lambda row: dict(
            messages=asked(row["text"]), sampling_params=dict(temperature=0.0, max_tokens=30)
        ),
        postprocess=lambda row: dict(answer=row["generated_text"], **row),
    )
    rows = processor(data.from_items([{"text": row["prompt"]} for row in DATES])).take_all()
    (path / "answers.json").write_text(json.dumps(rows))
    return data.from_items([{"answer": r["answer"], "text": r["text"]} for r in rows])


NAMES_TO_DROP = [
    "messages", "sampling_params", "usage", "token_counts", "generated_text", "json", "prompt",
    "prompt_token_ids", "request_id", "params", "generated_tokens", "num_generated_tokens",
    "num_input_tokens", "time_taken_llm", "embeddings", "guided_decoding",
]  # fmt: skip


@script
def extraction_from_articles(llm, data, model, _path):
    """A long pipeline: columns are carried through preprocess, and those of the engine dropped."""

    def preprocess(row):
        row = {**row, "messages": asked(row["article"], "Extract facts")}
        row["sampling_params"] = {
            "temperature": 0.0, "max_tokens": 40, "guided_decoding": {"regex": "[0-9]{4}"},
            "detokenize": False, "skip_special_tokens": True,
        }  # fmt: skip
        return row

    def postprocess(row):
        timed = row["time_taken_llm"] > 0 and bool(row["params"]) and row["request_id"] >= 0
        kept = {name: cell for name, cell in row.items() if name not in NAMES_TO_DROP}
        kept.pop("__inference_error__", None)
        kept |= {"year": row["generated_text"], "usage": str(row.get("usage"))}
        return {name: kept[name] for name in ("id", "article", "year", "usage")} | {"ok": timed}

    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={
            "max_model_len": 256, "gpu_memory_utilization": 0.85, "tensor_parallel_size": 1,
            "max_num_batched_tokens": 2048, "max_num_seqs": 16, "enable_chunked_prefill": False,
            "enforce_eager": True, "tokenizer_pool_size": 2, "trust_remote_code": True,
        },
        concurrency=1,
        batch_size=16,
    )  # fmt: skip
    processor = llm.build_processor(config, preprocess=preprocess, postprocess=postprocess)
    frame = pd.DataFrame({"id": range(3), "article": ["May 2021", "June 1999", "2020"]})
    return processor(data.from_pandas(frame))


@script
def translation(llm, data, model, _path):
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        accelerator_type="L4",
        engine_kwargs={
            "max_num_batched_tokens": 8192, "max_model_len": 256, "max_num_seqs": 128,
            "tensor_parallel_size": 1, "trust_remote_code": True,
        },
        concurrency=1,
        batch_size=128,
    )  # fmt: skip
    processor = llm.build_processor(
        config,
        preprocess=lambda row: dict(
            messages=asked(row["prompt"]),
            sampling_params={"temperature": 0.0, "max_tokens": 20, "top_p": 0.9},
        ),
        postprocess=lambda row: {"translated": row["generated_text"], "id": row["id"]},
    )
    return processor(data.from_items(DATES))


@script
def seeds_by_row(llm, data, model, _path):
    """A class around a processor of an older Ray: a bundle, variables, a seed in each row."""
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        resources_per_bundle={"CPU": 1},
        concurrency=1,
        engine_kwargs={
            "tensor_parallel_size": 1, "enable_chunked_prefill": True, "max_model_len": 256,
            "max_num_batched_tokens": 4096, "swap_space": 16, "trust_remote_code": True,
        },
        runtime_env={"env_vars": {"MKL_THREADING_LAYER": "GNU"}},
        max_concurrent_batches=4,
        batch_size=8,
        apply_chat_template=True,
        tokenize=True,
        detokenize=True,
    )  # fmt: skip

    def preprocess(row):
        params = {"max_tokens": 8, "temperature": 0.0, "top_p": 0.95}
        if "seed" in row and row["seed"] is not None:
            params["seed"] = int(row["seed"])
        return {"messages": asked(row["prompt"]), "sampling_params": params}

    def postprocess(row):
        result = {"output": row["generated_text"]}
        for key in row:
            if key not in ["generated_text", "messages", "sampling_params"]:
                result[key] = row[key]
        return result

    processor = llm.build_processor(config, preprocess=preprocess, postprocess=postprocess)
    frame = pd.DataFrame(DATES).assign(seed=[1, 2, 3, 4, 5])
    results = processor(data.from_pandas(frame)).materialize().to_pandas().to_dict("records")
    return data.from_items([{"output": r["output"], "seed": r["seed"]} for r in results])


@script
def samples_of_premises(llm, data, model, _path):
    """`n` copies of a row, each with parameters of its own in a column."""

    def copies(row):
        return [
            {**row, "copy": i, "sampling_params": {"n": 1, "temperature": 0.0, "max_tokens": 5 + i,
                                                   "seed": 7 + i}}
            for i in range(2)
        ]  # fmt: skip

    def postprocess(row):
        if isinstance(row.get("generated_texts"), list):
            text = row["generated_texts"][0] if row["generated_texts"] else ""
        else:
            text = row.get("generated_text", "")
        digits = re.findall("[0-9]+", text)
        return {"id": row["id"], "copy": row["copy"], "sample": text, "digits": digits}

    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={
            "dtype": "bfloat16", "gpu_memory_utilization": 0.9, "max_model_len": 256,
            "max_num_batched_tokens": 4096, "tensor_parallel_size": 1, "swap_space": 32,
            "enable_chunked_prefill": True, "enforce_eager": True,
        },
        concurrency=1,
        batch_size=64,
    )  # fmt: skip
    processor = llm.build_processor(
        config,
        preprocess=lambda row: {
            "messages": asked(row["prompt"]), "sampling_params": row["sampling_params"],
            "id": row.get("id"), "copy": row["copy"], "answer": row.get("answer"),
        },
        postprocess=postprocess,
    )  # fmt: skip
    return processor(data.from_items(DATES).flat_map(copies))


@script
def several_completions(llm, data, model, path):
    """`n` above 1, of which Ray keeps the first; metrics of the rows."""

    def postprocess(row):
        return {
            "output": row["generated_text"],
            "num": row["num_generated_tokens"],
            "counted": (row["metrics"] or {}).get("num_generation_tokens", 0) > 0,
            "turns": len(row["messages"]),
        }

    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        concurrency=1,
        batch_size=32,
        engine_kwargs={
            "max_model_len": 256, "trust_remote_code": True, "tensor_parallel_size": 1,
        },
    )  # fmt: skip
    params = {"temperature": 0.0, "top_p": 1, "top_k": -1, "min_p": 0.0, "max_tokens": 9, "n": 2}
    processor = llm.build_processor(
        config,
        preprocess=lambda row: {"messages": asked(row["prompt"]), "sampling_params": params},
        postprocess=postprocess,
    )
    processor(data.from_pandas(pd.DataFrame(DATES))).write_parquet(str(path))
    return data.read_parquet(str(path))


@script
def base_and_instructed_models(llm, data, model, _path):
    """A class hierarchy: methods as functions, all rows taken and sorted by id."""

    class Model:
        def __init__(self, **config):
            self.processor = llm.build_processor(
                llm.vLLMEngineProcessorConfig(model_source=model, **config),
                preprocess=self.preprocess,
                postprocess=self.postprocess,
            )

        def preprocess(self, row):
            return {"messages": asked(row["text"], "x"), "sampling_params": row["sampling_params"]}

        def postprocess(self, row):
            return row

    of_rows = [
        {"text": row["prompt"], "sampling_params": {**SAMPLING, "stop": ["-"]}, "id": row["id"]}
        for row in DATES
    ]
    processor = Model(engine_kwargs={"max_model_len": 256}, concurrency=1, batch_size=4).processor
    results = sorted(processor(data.from_items(of_rows)).take(5), key=lambda row: row["id"])
    return data.from_items([{"ids": r["prompt_token_ids"], "id": r["id"]} for r in results])


@script
def labels_with_templates(llm, data, model, _path):
    """Functions made by functions; rows keep their ids; JSON is read where it is some."""

    def make_preprocess(template, params):
        def preprocess(row):
            merged = {**params, **row.get("sampling_params", {})}
            messages = asked(template.format(text=row.get("text", "")))
            return {"messages": messages, "sampling_params": merged, "row_id": row["row_id"]}

        return preprocess

    def postprocess(row, *, name):
        result = {key: row[key] for key in ("row_id",) if key in row}
        try:
            result[name] = str(json.loads(row["generated_text"]))
        except json.JSONDecodeError:
            result |= {name: row["generated_text"], "parse_error": True}
        return result

    processor = llm.build_processor(
        llm.vLLMEngineProcessorConfig(model_source=model, engine_kwargs={"max_model_len": 256}),
        preprocess=make_preprocess("date: {text} ->", SAMPLING),
        postprocess=functools.partial(postprocess, name="output"),
    )
    rows = [{"row_id": str(i), "text": f"{i} May 2021"} for i in range(3)]
    return processor(data.from_items(rows))


@script
def raw_prompts_and_failures(llm, data, model, _path):
    """Without a chat template, with rows that fail and stay, joined to what they came from."""
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={
            "tensor_parallel_size": 1, "max_model_len": 64, "enable_prefix_caching": True,
            "kv_cache_dtype": "auto", "max_num_seqs": 256, "trust_remote_code": True,
        },
        concurrency=(1, 1),
        batch_size=64,
        should_continue_on_error=True,
        max_concurrent_batches=8,
        experimental={"max_tasks_in_flight_per_actor": 16},
        chat_template_stage=False,
    )  # fmt: skip
    processor = llm.build_processor(
        config,
        preprocess=lambda row: {"prompt": row["prompt"], "sampling_params": SAMPLING},
        postprocess=lambda row: {"id": row["id"], "answer": row["generated_text"]},
    )
    rows = [*DATES, {"id": 9, "prompt": "x" * 100}]
    found = processor(data.from_items(rows)).take_all()
    return data.from_items(
        [{"id": r["id"], "answer": r.get("answer") or "", "failed": bool(r["__inference_error__"])}
         for r in found]
    )  # fmt: skip


@script
def log_probabilities(llm, data, model, _path):
    """Judges that weigh their answers by the probabilities of tokens."""

    def postprocess(row):
        first = row["logprobs"][0]
        token = row["generated_tokens"][0]
        return {
            "id": row["id"],
            "own": round(first[token]["logprob"], 1),
            "text": first[token]["decoded_token"],
            "rank": first[token]["rank"],
            "num": len(first),
        }

    processor = llm.build_processor(
        llm.vLLMEngineProcessorConfig(
            model_source=model, engine_kwargs={"max_model_len": 256, "max_logprobs": 20}
        ),
        preprocess=lambda row: {
            "messages": asked(row["prompt"]), "sampling_params": {**SAMPLING, "logprobs": 3},
        },
        postprocess=postprocess,
    )  # fmt: skip
    return processor(data.from_items(DATES))


@script
def a_stage_after_another(llm, data, model, _path):
    """Two processors, the second a judge of the first; resources of the functions are given."""
    config = llm.vLLMEngineProcessorConfig(
        model_source=model, engine_kwargs={"max_model_len": 256}, concurrency=1, batch_size=16
    )
    writer = llm.build_processor(
        config,
        preprocess=lambda row: dict(messages=asked(row["prompt"]), sampling_params=SAMPLING),
        postprocess=lambda row: dict(id=row["id"], answer=row["generated_text"]),
        preprocess_map_kwargs={"num_cpus": 0.5},
        postprocess_map_kwargs={"num_cpus": 0.25},
    )
    judge = llm.build_processor(
        config,
        preprocess=lambda row: dict(
            messages=asked(row["answer"]), sampling_params={**SAMPLING, "max_tokens": 4}
        ),
        postprocess=lambda row: dict(id=row["id"], verdict=row["generated_text"]),
    )
    written = writer(data.from_items(DATES)).materialize()
    return judge(written)


@refused("LoRA")
def an_adapter_by_row(llm, data, model, _path):
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        runtime_env={"env_vars": {"VLLM_USE_V1": "0"}},
        engine_kwargs={
            "enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_model_len": 256,
        },
        concurrency=1,
        batch_size=16,
    )  # fmt: skip
    processor = llm.build_processor(
        config,
        preprocess=lambda row: dict(
            model="adapters/one", messages=asked(row["prompt"]), sampling_params=SAMPLING
        ),
    )
    return processor(data.from_items(DATES))


@refused("kv_cache_dtype='fp8'")
def a_rounded_cache(llm, data, model, _path):
    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={"max_model_len": 256, "kv_cache_dtype": "fp8"},
        concurrency=(1, 1),
        batch_size=64,
    )
    return llm.build_processor(config)(data.from_items(DATES))
