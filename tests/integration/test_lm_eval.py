"""The evaluation harness with our engine and with transformers: the same metrics."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError, UnknownOptionError
from tests.local_ray import LOCAL_RAY
from tests.tiny import make_checkpoint
from tests.trained_model import save_trained, skip_without_trained

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval", reason="not installed: pip install '.[slow]'")

DATA = Path(__file__).parent.parent / "data" / "lm_eval"
PLAIN = {"dataset_path": "json", "test_split": "test"}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "num_fewshot": 2,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "dates": {
        "output_type": "generate_until",
        "doc_to_text": "date: {{text}}\nin digits:",
        "doc_to_target": "date",
        "num_fewshot": 3,
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
        "filter_list": [
            {
                "name": "date",
                "filter": [
                    {"function": "regex", "regex_pattern": "([0-9.]+)"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match"}],
    },
    "stories": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


def task(name: str) -> dict[str, Any]:
    files = {"test": str(DATA / f"{name}.jsonl")}
    shots = {"fewshot_split": "test"} if TASKS[name].get("num_fewshot") else {}
    return {"task": name, "dataset_kwargs": {"data_files": files}, **PLAIN, **shots, **TASKS[name]}


def evaluate(model: str, arguments: Mapping[str, Any], limit: int | None, **options: Any) -> Any:
    from lm_eval import simple_evaluate  # noqa: PLC0415 - may not be installed

    import raymoe.lm_eval  # noqa: F401, PLC0415 - makes the model known

    return simple_evaluate(
        model=model,
        model_args=dict(arguments),
        tasks=[task(name) for name in TASKS],
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
        **options,
    )


def compare(directory: Path, limit: int | None, **options: Any) -> None:
    """Metrics of both, and the answers to each request.

    torch sums the terms of a softmax in their own type. Of Gemma's 262,144 words in float32 the
    sum is short by 3e-5, so that the log probability of each token is that much too high: 3e-3 for
    a text of 100 tokens, while ours is within 1e-4 of a model in float64. So their model computes
    in float32, and its softmax in float64.
    """
    model = {"pretrained": str(directory), "dtype": "float32"}
    ours = evaluate("raymoe", model, limit, device="cpu", **options)
    theirs = evaluate(
        "hf", {**model, "softmax_dtype": "float64"}, limit, device="cpu", batch_size=8, **options
    )
    assert_same_results(ours, theirs)


def assert_same_results(ours: Any, theirs: Any) -> None:
    for name in TASKS:
        found, wanted = ours["samples"][name], theirs["samples"][name]
        assert len(found) == len(wanted) > 0
        for one, other in zip(found, wanted, strict=True):
            assert one["arguments"] == other["arguments"]
            assert_same_answers(one["resps"], other["resps"])
        for metric, value in theirs["results"][name].items():
            got = ours["results"][name][metric]
            assert got == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)


def assert_same_answers(found: Any, wanted: Any) -> None:
    """Texts and verdicts are the same, log probabilities within 1e-3."""
    if isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-3)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same_answers(one, other)
    else:
        assert found == wanted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "mixtral"
    return make_checkpoint(directory, max_position_embeddings=256)  # stories are longer


@pytest.fixture
def local_ray() -> Iterator[None]:
    ray.init("local", **LOCAL_RAY)
    yield
    ray.shutdown()


def test_metrics_are_those_of_transformers(model: Path) -> None:
    compare(model, limit=6)


def test_metrics_of_a_trained_model_are_those_of_transformers(tmp_path: Path) -> None:
    skip_without_trained()
    save_trained(tmp_path)
    compare(tmp_path, limit=None)


def test_chat_templates_and_messages_of_shots_are_those_of_transformers(model: Path) -> None:
    compare(model, limit=2, apply_chat_template=True, fewshot_as_multiturn=True)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")
@pytest.mark.filterwarnings("ignore::FutureWarning:ray.*")
def test_actors_find_what_one_engine_finds(model: Path, local_ray: None) -> None:
    arguments = {"pretrained": str(model), "dtype": "float32"}
    chat = {"apply_chat_template": True, "fewshot_as_multiturn": True}
    one = evaluate("raymoe", arguments, 4, device="cpu", **chat)
    two = evaluate("raymoe", {**arguments, "num_actors": 2}, 4, device="cpu", **chat)
    assert_same_results(two, one)


def test_answers_in_the_cache_are_not_computed_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"pretrained": str(model), "dtype": "float32"}
    options = {"device": "cpu", "use_cache": str(tmp_path / "answers")}
    first = evaluate("raymoe", arguments, 2, **options)
    for name in ("score", "generate"):
        monkeypatch.delattr(Engine, name)
    assert_same_results(evaluate("raymoe", arguments, 2, **options), first)


def test_it_runs_from_the_command_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "choices.yaml").write_text(json.dumps(task("choices")))
    subprocess.run(
        [
            *(sys.executable, "-m", "raymoe.lm_eval", "run", "--model", "raymoe", "--limit", "3"),
            *("--model_args", f"pretrained={model},dtype=float32", "--device", "cpu"),
            *("--tasks", "choices", "--include_path", str(tmp_path)),
            *("--output_path", str(tmp_path / "out")),
        ],
        check=True,
    )
    (found,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(found.read_text())["results"]["choices"]["acc,none"] >= 0


def test_what_it_does_not_know_is_named(model: Path) -> None:
    from raymoe.lm_eval import RaymoeLM, _sampling_params  # noqa: PLC0415 - may not be installed

    with pytest.raises(UnknownOptionError, match="dtyp"):
        RaymoeLM(str(model), dtyp="float32")
    with pytest.raises(ConfigError, match="num_actors is 'two'; it takes a whole number"):
        RaymoeLM(str(model), num_actors="two")
    with pytest.raises(ConfigError, match="generation_kwargs has num_beams"):
        _sampling_params({"max_gen_toks": 4, "num_beams": 3}, [])
    greedy = _sampling_params({"max_gen_toks": 4, "do_sample": False, "top_p": 0.5}, ["\n"])
    assert (greedy.temperature, greedy.max_tokens) == (0.0, 4)


def test_more_tokens_than_the_model_takes_are_refused(model: Path) -> None:
    from raymoe.lm_eval import RaymoeLM  # noqa: PLC0415 - may not be installed

    harness = RaymoeLM(str(model), dtype="float32", device="cpu", max_length=64)
    with harness.engine:
        with pytest.raises(ConfigError, match="70 tokens are to be scored, and the model takes 64"):
            harness._loglikelihood_tokens([(None, [1], [5] * 70)])
        with pytest.raises(ConfigError, match="64 tokens are to be generated"):
            harness._context("a", 64)
