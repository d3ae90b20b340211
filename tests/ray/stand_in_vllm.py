"""Ray's own processor in this process, with raymoe's engine in the place of vLLM.

Its columns, names and formats are Ray's; its tokens are ours.
"""

import asyncio
import dataclasses
import sys
import types
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raymoe import MoEEngineProcessorConfig
from raymoe.engine.tasks.rows import TaskRow
from tests.ray import local_data

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's, about pydantic
    from ray.data import llm


class Params:
    """The arguments of vLLM's SamplingParams and PoolingParams."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __str__(self) -> str:
        return f"SamplingParams({self.options})"


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclasses.dataclass
class Metrics:
    num_generation_tokens: int
    arrival_time: float = 0.0


class RequestOutput(SimpleNamespace):
    finished = True


class PoolingRequestOutput(SimpleNamespace):
    finished = True


class AsyncEngine:
    def __init__(self, kwargs: dict[str, Any]) -> None:
        self._is_head = kwargs.get("convert") == "classify"
        head = "none" if kwargs.get("convert") == "embed" else "auto"
        self._engine = local_data.open_engine(kwargs["model"], head, kwargs.get("max_model_len"))

    @classmethod
    def from_engine_args(cls, args: Any, **_: Any) -> "AsyncEngine":
        return cls(args.kwargs)

    async def generate(self, *, prompt: dict[str, Any], sampling_params: Params, **_: Any) -> Any:
        options = {k: v for k, v in sampling_params.options.items() if v is not None}
        text = prompt.get("prompt_token_ids") or prompt["prompt"]
        (one,) = await self._engine.agenerate([list(text) if isinstance(text, list) else text],
                                              options)  # fmt: skip
        if one.error:
            raise ValueError(one.error)
        logprobs = None
        if one.logprobs is not None:
            tokens = {t for entry in one.logprobs for t, _ in entry.top}
            texts = self._engine.token_bytes(tokens | set(one.token_ids))
            logprobs = [
                {
                    token: Logprob(value, rank, texts[token].decode(errors="replace"))
                    for rank, (token, value) in enumerate(entry.top, 1)
                }
                for entry in one.logprobs
            ]
        ids = text if isinstance(text, list) else self._engine.read_prompts([text], [{}])[0][1]
        yield RequestOutput(
            prompt_token_ids=list(ids), prompt_logprobs=None,
            metrics=Metrics(one.num_generated_tokens),
            outputs=[SimpleNamespace(token_ids=list(one.token_ids), text=one.text,
                                     logprobs=logprobs)],
        )  # fmt: skip

    async def encode(self, *, prompt: dict[str, Any], **_: Any) -> Any:
        ids = prompt.get("prompt_token_ids") or prompt["prompt"]
        task = {"task": "classify" if self._is_head else "embed"}
        row = TaskRow(list(ids) if isinstance(ids, list) else ids, None)
        (future,) = self._engine.submit_task([row], task)
        one = await asyncio.wrap_future(future)
        if self._is_head:
            data = [entry["probability"] for entry in one.values["label_probabilities"]]
        else:
            data = one.values["embedding"]
        yield PoolingRequestOutput(
            prompt_token_ids=list(ids) if isinstance(ids, list) else [0],
            outputs=SimpleNamespace(data=torch.as_tensor(data)),
        )

    async def do_log_stats(self) -> None:
        pass


class EngineArgs:
    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def create_engine_config(self) -> Any:
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=64),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        )


def modules() -> dict[str, types.ModuleType]:
    """Return the modules of vLLM that Ray imports."""
    found = {name: types.ModuleType(name) for name in (
        "vllm", "vllm.inputs", "vllm.inputs.llm", "vllm.outputs", "vllm.sampling_params", "vllm.v1",
        "vllm.v1.metrics", "vllm.v1.metrics.ray_wrappers",
    )}  # fmt: skip
    top = found["vllm"]
    top.SamplingParams = top.PoolingParams = Params
    top.AsyncEngineArgs, top.AsyncLLMEngine = EngineArgs, AsyncEngine
    top.outputs, top.sampling_params = found["vllm.outputs"], found["vllm.sampling_params"]
    top.outputs.RequestOutput = RequestOutput
    top.outputs.PoolingRequestOutput = PoolingRequestOutput
    top.sampling_params.StructuredOutputsParams = dict
    found["vllm.inputs.llm"].TextPrompt = found["vllm.inputs.llm"].TokensPrompt = dict
    found["vllm.v1.metrics.ray_wrappers"].RayPrometheusStatLogger = None
    return found


class LocalProcessor:
    """Runs a processor of Ray's in this process, stage by stage; rows pass Arrow in between."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, dataset: Any) -> Any:
        processor = self._processor
        rows = [processor.preprocess(row) for row in dataset.take_all()]
        for stage in processor.stages.values():
            kwargs = stage.get_dataset_map_batches_kwargs(
                batch_size=len(rows), data_column=processor.DATA_COLUMN
            )
            udf = stage.fn(**kwargs["fn_constructor_kwargs"])
            data = asyncio.run(_run(udf, [row[processor.DATA_COLUMN] for row in rows]))
            rows = [{processor.DATA_COLUMN: row} for row in data]
        return local_data.from_items([processor.postprocess(row) for row in rows])


async def _run(stage: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async for batch in stage({stage.data_column: rows}):
        return local_data.through_arrow(batch[stage.data_column])
    raise AssertionError("a stage has no output")


def config(**options: Any) -> Any:
    """Return Ray's configuration, also for names of an older Ray."""
    ours = MoEEngineProcessorConfig(**options)
    fields = {one.name: getattr(ours, one.name) for one in dataclasses.fields(ours)}
    return llm.vLLMEngineProcessorConfig(
        **{name: value for name, value in fields.items() if value is not None}
    )


def build_processor(*args: Any, **kwargs: Any) -> LocalProcessor:
    from ray.llm._internal.batch.processor import vllm_engine_proc as built  # noqa: PLC0415

    sys.modules.update(modules())
    with pytest.MonkeyPatch.context() as patch:  # it would start a cluster
        patch.setattr(built.ray, "init", lambda **_: None)
        agent = SimpleNamespace(push_telemetry_report=lambda _: None)
        patch.setattr(built, "get_or_create_telemetry_agent", lambda: agent)
        return LocalProcessor(llm.build_processor(*args, **kwargs))


RAYS = SimpleNamespace(
    vLLMEngineProcessorConfig=config,
    build_processor=build_processor,
    ChatTemplateStageConfig=llm.ChatTemplateStageConfig,
    TokenizerStageConfig=llm.TokenizerStageConfig,
    DetokenizeStageConfig=llm.DetokenizeStageConfig,
)
