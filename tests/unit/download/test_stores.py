"""Models in a store: read by ranges, once, read on where that broke off, and anew when changed."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyarrow import fs

from raymoe.assets import demo_model_path
from raymoe.data.sizing import map_batches_kwargs
from raymoe.download import stores
from raymoe.download.files import UnreachableError
from raymoe.download.hub import HubModel
from raymoe.download.models import fetch_files, find_files, find_model, open_model, resolve_model
from raymoe.engine.identity import ModelIdentity
from raymoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.workload import Workload

DEMO = demo_model_path()
URI = "s3://bucket/models/demo"
WEIGHTS = "model.safetensors"
CHUNK_BYTES = 1_000_000  # of 6.9 MB


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store that is a directory, with a model in it."""
    root = tmp_path / "store"
    filesystem = fs.SubTreeFileSystem(str(root), fs.LocalFileSystem())
    monkeypatch.setattr(stores, "open_uri", lambda uri: (filesystem, uri.partition("://")[2]))
    monkeypatch.setattr(stores, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(stores, "RETRY_AFTER_S", ())
    monkeypatch.setenv("RAYMOE_CACHE", str(tmp_path / "cache"))
    model = root / "bucket" / "models" / "demo"
    shutil.copytree(DEMO, model, ignore=lambda *_: [".raymoe-digests.json"])
    return model


class Reads:
    """Counts the ranges that are read; from the `limit`th on the store is away."""

    def __init__(self, monkeypatch, limit=None):
        self.begins, self._limit, self._read = [], limit, stores._read
        monkeypatch.setattr(stores, "_read", self)

    def __call__(self, file, num_bytes, begin):
        if self._limit is not None and len(self.begins) >= self._limit:
            raise OSError("NETWORK_CONNECTION")
        self.begins.append(begin)
        return self._read(file, num_bytes, begin)


def test_a_plan_reads_all_but_the_weights(store, monkeypatch) -> None:
    reads = Reads(monkeypatch)
    workload = Workload(num_rows=1000, prompt_tokens=20, generated_tokens=10)
    options = {"engine_config": {"hardware": hardware_preset("l4")}, "workload": workload}
    there, here = (map_batches_kwargs(model, **options) for model in (URI, DEMO))
    assert there["fn_constructor_args"] == (URI,)
    assert there["memory"] == here["memory"] is not None
    assert find_files(URI).name == "demo"
    assert find_model(URI) is None
    assert reads.begins == []


def test_a_model_is_copied_once_and_compared_from_then_on(store, monkeypatch) -> None:
    reads = Reads(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(resolve_model, [URI, URI])
    assert first == second == find_model(URI)
    assert sorted(reads.begins) == list(range(0, 6_911_992, CHUNK_BYTES))
    for path in store.iterdir():
        assert (first / path.name).read_bytes() == path.read_bytes()
    there, here = ModelIdentity.of(URI), ModelIdentity.of(DEMO)
    for part in ("config", "tokenizer", "chat_template", "weights"):
        assert getattr(there, part) == getattr(here, part)
    assert len(reads.begins) == 7

    content = bytearray((store / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (store / WEIGHTS).write_bytes(content)  # as many bytes
    fetch_files(URI)
    assert find_model(URI) is None
    assert (resolve_model(URI) / WEIGHTS).read_bytes() == content


def test_a_copy_is_read_on_where_it_broke_off(store, monkeypatch) -> None:
    monkeypatch.setattr(stores, "NUM_READERS", 1)
    broken = Reads(monkeypatch, limit=3)
    with pytest.raises(UnreachableError, match=r"s3://bucket/models/demo cannot be read: NETWORK"):
        resolve_model(URI)
    (record,) = (find_files(URI) / stores.STATE).glob("*.ranges")
    with record.open("a") as file:
        file.write("5")  # of a process that died in between
    monkeypatch.setattr(stores, "_read", broken._read)
    reads = Reads(monkeypatch)
    copy = resolve_model(URI)
    assert len(broken.begins) == 3
    assert sorted(broken.begins + reads.begins) == list(range(0, 6_911_992, CHUNK_BYTES))
    assert (copy / WEIGHTS).read_bytes() == (store / WEIGHTS).read_bytes()
    assert not list((copy / stores.STATE).glob("*.part"))


def test_an_object_that_changes_meanwhile_is_not_mixed(store, monkeypatch) -> None:
    reads = Reads(monkeypatch, limit=3)
    with pytest.raises(UnreachableError):
        resolve_model(URI)
    os.utime(store / WEIGHTS, ns=(1, 1))
    monkeypatch.setattr(stores, "_read", reads._read)
    reads = Reads(monkeypatch)

    def touch(*args):
        os.utime(store / WEIGHTS, ns=(2, len(reads.begins)))
        return Reads.__call__(reads, *args)

    monkeypatch.setattr(stores, "_read", touch)
    with pytest.raises(UnreachableError, match="has changed while it was read"):
        resolve_model(URI)
    assert len(reads.begins) == 7  # none of the former ranges was used
    monkeypatch.setattr(stores, "_read", reads._read)
    assert resolve_model(URI) == find_model(URI)


def test_a_whole_copy_is_used_where_the_store_is_away(store, monkeypatch, caplog) -> None:
    copy = resolve_model(URI)

    def away(_):
        raise OSError("NETWORK_CONNECTION")

    monkeypatch.setattr(stores, "open_uri", away)
    assert resolve_model(URI) == copy
    assert f"using the copy in {copy} as it is" in caplog.text
    with pytest.raises(UnreachableError, match="check the network"):
        fetch_files(URI)


def test_what_cannot_run_is_refused_before_weights_are_read(store, monkeypatch) -> None:
    reads = Reads(monkeypatch)
    with pytest.raises(CheckpointError, match=r"s3://bucket/none cannot be read: .*check the path"):
        fetch_files("s3://bucket/none")
    usage = shutil.disk_usage(store)._replace(free=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(CheckpointError, match=r"6\.59 MiB of weights .* 1 B are free"):
            resolve_model(URI)
    (store / WEIGHTS).rename(store / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"{URI} has no weights in safetensors; .*pickled"):
        fetch_files(URI)
    (store / "pytorch_model.bin").rename(store / WEIGHTS)
    shutil.rmtree(find_files(URI))
    (store / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedModelError, match="mamba"):
        map_batches_kwargs(URI)
    assert {path.name for path in find_files(URI).iterdir()} == {"config.json", stores.STATE}
    assert reads.begins == []


def test_uris_name_models() -> None:
    assert open_model("hf://org/name") == HubModel("org/name")
    assert open_model("hf://org/name@v1") == HubModel("org/name", "v1")
    assert open_model(f"file://{DEMO}") == DEMO
    for uri in ("hf://name", "hf://datasets/org/name", "hf://org/name@"):
        with pytest.raises(ConfigError, match="it takes hf://OWNER/NAME"):
            open_model(uri)
    with pytest.raises(ConfigError, match=r"ftp://host/model cannot be read.*it takes a path, or"):
        fetch_files("ftp://host/model")
