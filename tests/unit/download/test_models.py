import json
import socket

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from raymoe.config import EngineConfig
from raymoe.download import hub as client
from raymoe.download.files import UnreachableError
from raymoe.download.hub import fetch_config
from raymoe.download.models import resolve_model
from raymoe.engine.load import resolve_with_adapter
from raymoe.errors import CheckpointError, ConfigError


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub whose cache holds what the test put there, and that nothing can be downloaded from."""
    calls = []

    def snapshot_download(name, *, revision, local_files_only=False, **_):
        calls.append((name, revision, local_files_only))
        directory = tmp_path / name.replace("/", "--")
        if local_files_only and directory.is_dir():
            return str(directory)
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return calls


def test_a_directory_is_itself(tmp_path, hub) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path
    assert hub == []


def test_a_complete_snapshot_in_the_cache_is_not_downloaded(tmp_path, hub) -> None:
    directory = tmp_path / "org--name"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()
    assert resolve_model("org/name", revision="v1") == directory
    assert hub == [("org/name", "v1", True)]


def test_an_adapter_and_its_base_are_found_in_the_cache(tmp_path, hub) -> None:
    adapter, base = tmp_path / "org--lora", tmp_path / "org--base"
    for directory in (adapter, base):
        directory.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "base_model_name_or_path": "org/base"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").touch()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").touch()
    directory, found = resolve_with_adapter("org/lora", EngineConfig())
    assert (directory, found.adapter) == (base, str(adapter))
    assert all(is_local for _, _, is_local in hub)
    assert resolve_with_adapter("org/base", EngineConfig(adapter=adapter)) == (base, found)


def test_a_snapshot_without_all_shards_is_downloaded_again(tmp_path, hub) -> None:
    directory = tmp_path / "org--name"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "b.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match="downloading it failed"):
        resolve_model("org/name")
    assert [local for _, _, local in hub] == [True, True, False]


def test_a_name_that_the_hub_does_not_give_is_explained(hub) -> None:
    with pytest.raises(CheckpointError, match="'org/name' is neither a local directory nor"):
        resolve_model("org/name")


def test_a_configuration_without_a_network_is_that_of_the_cache(tmp_path, monkeypatch) -> None:
    """A download would try five times and take half a minute."""

    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(client, "getproxies", dict)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(UnreachableError, match=r"'org/name' is neither .*no network"):
        fetch_config("org/name")
    path = tmp_path / "config.json"
    path.write_text("{}")
    cached = {"config.json": str(path)}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda _, file, **__: cached.get(file)
    )
    assert fetch_config("org/name") == path


@pytest.mark.parametrize("name", ["/no/such/model", "./gone", "a/b/c", "org/na me"])
def test_what_cannot_be_a_hub_name_is_refused_without_asking(name: str, hub) -> None:
    with pytest.raises(ConfigError, match="neither a directory nor a name on the hub"):
        resolve_model(name)
    assert hub == []


def test_a_file_is_refused(tmp_path, hub) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(tmp_path / "model.safetensors")
