"""A model in a bucket: an S3 server on this machine, by its own API."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from raymoe import CheckpointError, Engine, demo_model_path
from raymoe.download import stores
from raymoe.download.files import UnreachableError
from raymoe.download.models import fetch_files, find_model, resolve_model
from tests.integration.test_cli_generate import generate, read_lines, write_lines
from tests.integration.test_cli_storage import BUCKET, bucket, endpoint, put  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.ray]
DEMO = demo_model_path()
FILES = [path for path in DEMO.iterdir() if not path.name.startswith(".")]
URI = f"s3://{BUCKET}/models/demo"
COPY = """
import sys
from raymoe.download import stores
from raymoe.download.models import resolve_model
stores.CHUNK_BYTES, stores.NUM_READERS = 64 * 1024, 2
print(resolve_model(sys.argv[1]))
"""


@pytest.fixture
def model(bucket, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("RAYMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "RETRY_AFTER_S", ())
    for path in FILES:
        put(bucket, f"models/demo/{path.name}", path.read_bytes())
    yield bucket
    bucket.delete_dir("models")


def test_an_engine_reads_a_model_of_a_bucket(model) -> None:
    directory = fetch_files(URI)
    assert find_model(URI) is None
    with Engine.from_pretrained(URI) as engine, Engine.from_pretrained(DEMO) as local:
        prompts, params = ["May 5th 2021"] * 2, {"max_tokens": 8, "temperature": 0.0}
        assert engine.generate(prompts, params) == local.generate(prompts, params)
    assert find_model(URI) == directory
    version = (directory / stores.STATE / "model.safetensors.version").read_text()
    assert version.startswith('[6911992, "')
    assert '\\"' in version  # an etag, which S3 quotes, and no time

    content = (DEMO / "model.safetensors").read_bytes()
    put(model, "models/demo/model.safetensors", content[:-1] + b"x")
    assert (resolve_model(URI) / "model.safetensors").read_bytes()[-1:] == b"x"


def test_a_process_that_is_killed_leaves_what_it_has_read(model, tmp_path) -> None:
    state = stores.StoreModel(URI).directory / stores.STATE
    environment = os.environ | {"RAYMOE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", COPY, URI]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while num_ranges(state) < 5:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    count = num_ranges(state)
    assert 5 <= count < 106
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert find_model(URI) is not None
    assert done.stdout.strip() == str(find_model(URI))
    for path in FILES:
        assert (find_model(URI) / path.name).read_bytes() == path.read_bytes()


def num_ranges(state):
    record = state / "model.safetensors.ranges"
    return record.read_text().count("\n") - 1 if record.exists() else 0


def test_a_store_says_no_at_once(model, monkeypatch) -> None:
    with pytest.raises(CheckpointError, match="check the path"):
        fetch_files(f"s3://{BUCKET}/models/other")
    with pytest.raises(CheckpointError, match="make the bucket or correct its name"):
        fetch_files("s3://other-bucket/models/demo")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match="check the network"):
        fetch_files(URI)


def test_the_command_runs_a_model_of_a_bucket(model, tmp_path) -> None:
    rows = [{"id": i, "prompt": f"{i} May 2021 ->"} for i in range(12)]
    write_lines(tmp_path / "in.jsonl", *map(json.dumps, rows))
    files = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    done = generate("--model", URI, *files, "--max-tokens", 4, "--temperature", 0)
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stderr
    assert all(row["generated_text"] for row in read_lines(tmp_path / "out.jsonl"))
