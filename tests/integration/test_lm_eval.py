"""The evaluation harness with our engine and with transformers: the same metrics."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from raymoe.engine.engine import Engine
from raymoe.errors import CheckpointError, ConfigError, UnknownOptionError
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
    with pytest.raises(ConfigError, match="enable_thinking needs think_end_token"):
        RaymoeLM(str(model), enable_thinking=True)
    with pytest.raises(ConfigError, match=r"gguf_file is 'a\.gguf'; give the"):
        RaymoeLM(str(model), gguf_file="a.gguf")
    with pytest.raises(ConfigError, match="chat_template_args is no JSON object"):
        RaymoeLM(str(model), chat_template_args="{")
    with pytest.raises(ConfigError, match="generation_kwargs has num_beams"):
        _sampling_params({"max_gen_toks": 4, "num_beams": 3}, [])
    greedy = _sampling_params({"max_gen_toks": 4, "do_sample": False, "top_p": 0.5}, ["\n"])
    assert (greedy.temperature, greedy.top_p, greedy.max_tokens) == (0.0, 1.0, 4)


GREEDY = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 24}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2, "top_p": 0.5, "num_beams": 1, "length_penalty": 1.0},
    {"temperature": 0.0, "do_sample": None, "repetition_penalty": 1.0},
    {"min_new_tokens": 20, "max_new_tokens": 22, "max_gen_toks": None},
]
HF_ARGUMENTS = {"trust_remote_code": False, "use_fast_tokenizer": True, "revision": "main"}


@pytest.mark.parametrize(
    "thinking",
    [
        {},
        {"think_end_token": "</think>"},
        {"enable_thinking": False, "think_end_token": "7"},
        {"chat_template_args": {"enable_thinking": False}},
    ],
)
def test_answers_and_chats_are_those_of_transformers(
    model: Path, tmp_path: Path, thinking: dict[str, Any]
) -> None:
    """Also with defaults of the checkpoint: some have a penalty in generation_config.json."""
    from lm_eval.api.instance import Instance  # noqa: PLC0415 - may not be installed
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

    from raymoe.lm_eval import RaymoeLM  # noqa: PLC0415

    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    settings = json.loads((directory / "generation_config.json").read_text())
    settings |= {"repetition_penalty": 1.2}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    template = "{{ enable_thinking }}: {% for m in messages %}{{ m.content }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    asked = [{k: v for k, v in (GREEDY | more).items() if v is not None} for more in OPTIONS]
    requests = [
        Instance("generate_until", {}, (text, given), index)
        for index, given in enumerate(asked)
        for text in ("Question: who?\nAnswer:", "a b c d")
    ]
    options = {"dtype": "float32", "device": "cpu", **HF_ARGUMENTS, **thinking}
    theirs = HFLM(pretrained=str(directory), batch_size=1, **options)
    ours = RaymoeLM(str(directory), **options)
    with ours.engine:
        chat = [{"role": "user", "content": "who?"}]
        assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
        wanted = theirs.generate_until(requests, disable_tqdm=True)
        assert ours.generate_until(requests, disable_tqdm=True) == wanted
        assert len(set(wanted)) > len(OPTIONS)
        empty = Instance("generate_until", {}, ("a b c d", GREEDY | {"until": ["", "x"]}), 0)
        (text,) = theirs.generate_until([empty], disable_tqdm=True)
        assert len(text) <= 1  # a token is a byte
        with pytest.raises(ConfigError, match="until has an empty text, at which `hf` ends every"):
            ours.generate_until([empty], disable_tqdm=True)


def test_stop_strings_with_special_tokens_end_answers_as_of_transformers(model: Path) -> None:
    """The harness reads them off the text with special tokens, and answers have none."""
    from raymoe.lm_eval import RaymoeLM  # noqa: PLC0415 - may not be installed

    harness = RaymoeLM(str(model), dtype="float32", device="cpu")
    special = harness.tokenizer.eos_token
    with harness.engine:
        assert harness._plain(["x", special, f"{special}user", ""]) == ["x", special]
        tokens = [
            token
            for part in ("ab", special, "user: c", special, "use")
            for token in harness.tok_encode(part, add_special_tokens=False)
        ]
        every = harness.tokenizer.decode(tokens, skip_special_tokens=True)
        assert harness._answer(tokens, [f"{special}user"]) == every[: every.index("user") + 4]
        assert harness._answer(tokens, [f"{special}us:", "c"]) == every[: every.index("c")]


def test_reasoning_is_not_scored(model: Path) -> None:
    from lm_eval.api.instance import Instance  # noqa: PLC0415 - may not be installed

    from raymoe.lm_eval import RaymoeLM  # noqa: PLC0415

    options = {"enable_thinking": True, "think_end_token": "</think>"}
    harness = RaymoeLM(str(model), dtype="float32", device="cpu", **options)
    with harness.engine, pytest.raises(ConfigError, match="a task scores continuations"):
        harness.loglikelihood([Instance("loglikelihood", {}, ("a", "b"), 0)])


def test_tokenizers_are_loaded_within_limits_and_without_code_of_a_repository(
    model: Path, tmp_path: Path
) -> None:
    from raymoe.lm_eval import _load_tokenizer  # noqa: PLC0415 - may not be installed

    shutil.copytree(model, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "model" / "own.py").write_text("raise SystemExit('code of a repository ran')")
    assert _load_tokenizer(tmp_path / "model", None).encode("a")
    (tmp_path / "model" / "vocab.json").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="a link that leaves the model directory"):
        _load_tokenizer(tmp_path / "model", None)


def test_more_tokens_than_the_model_takes_are_refused(model: Path) -> None:
    from raymoe.lm_eval import RaymoeLM  # noqa: PLC0415 - may not be installed

    harness = RaymoeLM(str(model), dtype="float32", device="cpu", max_length=64)
    with harness.engine:
        with pytest.raises(ConfigError, match="70 tokens are to be scored, and the model takes 64"):
            harness._loglikelihood_tokens([(None, [1], [5] * 70)])
        with pytest.raises(ConfigError, match="64 tokens are to be generated"):
            harness._context("a", 64)
