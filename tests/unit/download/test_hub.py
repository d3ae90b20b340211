"""Models of a hub: plans read small files, what cannot run is refused, weights come once."""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from raymoe.assets import demo_model_path
from raymoe.download import hub as client
from raymoe.download.files import UnreachableError
from raymoe.download.models import fetch_files, find_files, find_model, resolve_model
from raymoe.engine.identity import ModelIdentity
from raymoe.errors import CheckpointError, UnsupportedModelError
from tests.hub import used_hub

DEMO = demo_model_path()
MAMBA = {"config.json": b'{"model_type": "mamba"}', "model.safetensors": b"-"}
ADAPTER = {
    "adapter_config.json": json.dumps(
        {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "base_model_name_or_path": "org/demo"}
    ).encode(),
    "adapter_model.safetensors": b"-",
}


@pytest.fixture
def hub(tmp_path):
    with used_hub(tmp_path / "hub") as found:
        found.put("org/demo", DEMO)
        yield found


def test_a_plan_reads_all_but_the_weights(hub, caplog) -> None:
    assert find_files("org/demo") is None
    with caplog.at_level(logging.INFO, "ray.data"):
        directory = fetch_files("org/demo")
    assert "org/demo: each node that does not have it downloads 6.59 MiB once" in caplog.text
    assert find_files("org/demo") == directory
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in directory.iterdir()} >= names
    assert hub.downloads() == []
    assert find_model("org/demo") is None

    count = len(hub.requests)
    assert fetch_files("org/demo") == directory
    assert len(hub.requests) - count == 2  # whether it is there, and the same


def test_an_adapter_is_planned_as_its_base(hub) -> None:
    hub.put("org/lora", ADAPTER)
    assert fetch_files("org/lora") == find_files("org/lora") == find_files("org/demo")
    assert hub.downloads() == []
    hub.put("org/other", ADAPTER)
    with pytest.raises(CheckpointError, match=r"is an adapter, which is no model.*hf download"):
        client.fetch_config("org/other")


@pytest.mark.parametrize(
    ("name", "token", "match", "num_requests"),
    [
        ("org/missing", None, "no model 'org/missing', or a private one, and no access token", 1),
        ("org/missing", "mine", "no model 'org/missing', .*that is set here does not open it", 1),
        ("org/private", None, "or a private one, and no access token .* set HF_TOKEN on every", 1),
        ("org/gated", None, "'org/gated' is gated .*no access token is set here: accept its", 2),
        ("org/gated", "mine", "'org/gated' is gated .*does not open it: accept its conditions", 2),
        ("org/demo", "expired", r"no access to 'org/demo' \(HTTP status 401.*credentials", 1),
        ("org/pickled", None, "no weights in safetensors; .*bin holds pickled weights", 1),
        ("org/gguf", None, "no config.json; model-Q8_0.gguf holds a model of llama.cpp", 1),
        ("org/empty", None, "no config.json; it is no model of transformers", 1),
        ("org/mamba", None, "model_type 'mamba' is not supported", 3),
    ],
)
def test_what_cannot_run_is_refused_by_few_questions(
    tmp_path, name, token, match, num_requests
) -> None:
    with used_hub(tmp_path, token) as hub:
        hub.put("org/demo", DEMO)
        hub.put("org/private", DEMO, token="yours")
        hub.put("org/gated", DEMO, token="yours", is_gated=True)
        hub.put("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"-"})
        hub.put("org/gguf", {"model-Q8_0.gguf": b"-"})
        hub.put("org/empty", {})
        hub.put("org/mamba", MAMBA | {"tokenizer.json": b"{}"})
        with pytest.raises((CheckpointError, UnsupportedModelError), match=match) as caught:
            fetch_files(name)
        assert not isinstance(caught.value, UnreachableError)
        assert len(hub.requests) == num_requests


def test_a_token_opens_what_is_gated(tmp_path) -> None:
    with used_hub(tmp_path, "mine") as hub:
        hub.put("org/gated", DEMO, token="mine", is_gated=True)
        assert (fetch_files("org/gated") / "config.json").is_file()


def test_a_hub_that_does_not_answer_says_nothing_of_the_model(hub, monkeypatch) -> None:
    monkeypatch.setattr(client, "HUB_LIMIT_S", 0.05)
    hub.waits.clear()
    with pytest.raises(UnreachableError, match=r"downloading it failed \(.*Timeout"):
        fetch_files("org/demo")
    assert len(hub.requests) == 1


def test_weights_come_once_for_all_processes_of_a_node(hub, caplog, monkeypatch) -> None:
    """Each has a file of its own open for the lock, as threads here have."""
    begun, downloads = threading.Event(), []
    snapshot = client._snapshot

    def begin(*args, **only_from_cache):
        if not only_from_cache:
            downloads.append(args)
            begun.set()
        return snapshot(*args, **only_from_cache)

    monkeypatch.setattr(client, "_snapshot", begin)
    with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.INFO, "ray.data"):
        first = pool.submit(resolve_model, "org/demo")
        assert begun.wait(30)
        directory = resolve_model("org/demo")
        assert first.result() == directory
    assert len(downloads) == len(hub.downloads()) == 1
    assert "org/demo: 0 B of 6.60 MiB here after" in caplog.text
    assert "org/demo: 6.60 MiB of 6.60 MiB here after" in caplog.text

    hub.requests.clear()
    assert resolve_model("org/demo") == find_model("org/demo") == directory
    assert fetch_files("org/demo") == directory
    assert hub.requests == []  # README.md, which nobody needs, is not asked for


def test_a_model_is_the_same_wherever_it_comes_from(hub) -> None:
    there, here = ModelIdentity.of("org/demo"), ModelIdentity.of(DEMO)
    for part in ("config", "tokenizer", "chat_template", "weights"):
        assert getattr(there, part) == getattr(here, part)
