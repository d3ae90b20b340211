"""Public scripts for ray.data.llm with another import, beside what Ray's own processor gives."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
import transformers

import raymoe
from raymoe.data import processor
from tests.local_ray import LOCAL_RAY
from tests.ray import local_data, stand_in_vllm
from tests.ray.ported_scripts import REFUSED, SCRIPTS

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore:Use 'expr' instead of 'fn':UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
OURS = SimpleNamespace(
    **vars(stand_in_vllm.RAYS)
    | {
        "vLLMEngineProcessorConfig": raymoe.MoEEngineProcessorConfig,
        "build_processor": raymoe.build_processor,
    }
)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
# What Ray's rows do not have, in the scripts that return all names of a row.
OUR_NAMES = {"finish_reason", "num_cached_tokens"}


@pytest.fixture(scope="module")
def cluster():
    resources = {"accelerator_type:L4": 1, "TPU": 1}
    ray.init("local", **LOCAL_RAY | {"num_cpus": 8}, resources=resources)
    yield
    ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def _without_vllm():
    yield
    local_data.open_engine.cache_clear()  # engines end with what refers to them
    for name in stand_in_vllm.modules():
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A chat model, and a classifier with one output.

    Its tokenizer adds no BOS: Ray's stages add one to chats too, beside that of a template.
    """
    chat, classifier = (tmp_path_factory.mktemp("models") / name for name in ("chat", "classifier"))
    shutil.copytree(raymoe.demo_model_path(), chat)
    (chat / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = json.loads((chat / "tokenizer.json").read_text())
    (chat / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    config = transformers.AutoConfig.from_pretrained(chat, num_labels=1)
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(classifier)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chat / name, classifier)
    return chat, classifier


def run(script, llm, data, model, path: Path) -> list[dict]:
    path.mkdir()
    rows = script(llm, data, str(model), path).take_all()
    for row in rows:
        if "names" in row:
            row["names"] = sorted({*row["names"]} - OUR_NAMES)
    return sorted(rows, key=str)


def rays_rows(name: str, model: Path, path: Path) -> list[dict]:
    return run(SCRIPTS[name], stand_in_vllm.RAYS, local_data, model, path / "rays")


ONE_OF_ALL = "without_functions"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == ONE_OF_ALL else pytest.mark.slow) for name in SCRIPTS],
)
def test_a_script_gives_what_rays_processor_gives(name, models, tmp_path, monkeypatch) -> None:
    """Ray's stages and our operator in this process, one after the other."""
    monkeypatch.setattr(processor, "_generated", lambda ds, *options: ds.generate(*options))
    model = models["classif" in name]
    ours = run(SCRIPTS[name], OURS, local_data, model, tmp_path / "ours")
    assert ours == rays_rows(name, model, tmp_path)
    assert ours


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_on_a_cluster(cluster, name, models, tmp_path) -> None:
    model = models["classif" in name]
    ours = run(SCRIPTS[name], OURS, ray.data, model, tmp_path / "ours")
    assert ours == rays_rows(name, model, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_whose_answers_would_differ_is_refused(name, models, tmp_path) -> None:
    script, reason = REFUSED[name]
    with pytest.raises(raymoe.ConfigError, match=reason):
        run(script, OURS, local_data, models[0], tmp_path / "ours")
