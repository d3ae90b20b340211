"""`raymoe generate` from and to an object store: an S3 server on this machine, by its own API."""

import json
import re
import signal
import socket
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from raymoe.assets import demo_model_path
from tests.integration.test_cli_batch import request
from tests.integration.test_cli_generate import generate, read_lines, write_lines

pytestmark = [pytest.mark.slow, pytest.mark.ray]
BUCKET = "jobs"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(port, process):
    while True:
        assert process.poll() is None, "the server ended"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return


@pytest.fixture(scope="module")
def endpoint():
    """Run a server of S3's API."""
    pytest.importorskip("moto", reason="pip install '.[slow]'")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(port, process)
        yield f"127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)


@pytest.fixture
def bucket(endpoint, monkeypatch):
    """An empty bucket, and an environment with which the command finds it."""
    settings = {
        "AWS_ENDPOINT_URL": f"http://{endpoint}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    store = fs.S3FileSystem(
        endpoint_override=endpoint,
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
        allow_bucket_deletion=True,
    )
    store.create_dir(BUCKET)
    yield fs.SubTreeFileSystem(BUCKET, store)
    store.delete_dir(BUCKET)


def names(bucket, directory):
    selector = fs.FileSelector(directory, recursive=True)
    return sorted(info.path for info in bucket.get_file_info(selector) if info.is_file)


def put(bucket, path, content):
    with bucket.open_output_stream(path) as stream:
        stream.write(content)


def put_table(bucket, path, table):
    with bucket.open_output_stream(path) as stream:
        pq.write_table(table, stream)


def options(source, output):
    where = ("--input", f"s3://{BUCKET}/{source}", "--output", f"s3://{BUCKET}/{output}")
    return ("--model", demo_model_path(), *where)


def test_samples_of_parquet_on_a_store_are_resumed_from_the_parts_that_are_there(bucket):
    table = pa.table({"id": [f"r{one}" for one in range(30)], "prompt": ["Mar 5th 2021"] * 30})
    put_table(bucket, "in put/a.parquet", table.slice(0, 20))
    sampling = json.dumps({"n": 3, "temperature": 1.0})
    how = (*options("in put/", "out/answers"), "--id-column", "id", "--samples-as-rows")
    how = (*how, "--sampling-params", sampling, "--max-tokens", 4)
    done = generate(*how)
    assert done.returncode == 0, done.stderr
    assert "no journal" in done.stderr
    manifest, part = names(bucket, "out")
    assert manifest == "out/answers.manifest.json"
    assert re.fullmatch(r"out/answers/part-000000-[0-9a-f]{8}\.parquet", part)

    put_table(bucket, "in put/b.parquet", table.slice(20))
    again = generate(*how, "--resume")
    assert again.returncode == 0, again.stderr
    assert "20 of 30 rows are already written" in again.stderr
    parts = [name for name in names(bucket, "out") if name.endswith(".parquet")]
    name = r"out/answers/part-00000[01]-[0-9a-f]{8}\.parquet"
    assert len(parts) == 2
    assert all(re.fullmatch(name, part) for part in parts)
    order = [("id", "ascending"), ("sample_index", "ascending")]
    found = pq.read_table(parts, filesystem=bucket).sort_by(order)
    ids = sorted(table.column("id").to_pylist())
    assert found.column("id").to_pylist() == [one for one in ids for _ in range(3)]
    assert found.column("sample_index").to_pylist() == [0, 1, 2] * 30
    assert set(found.column("__inference_error__").to_pylist()) == {""}
    refused = generate(*how, "--resume", "--seed", 3)
    assert refused.returncode == 2
    assert "s3://jobs/out/answers.manifest.json is of another job" in refused.stderr


def test_an_openai_batch_on_a_store_gives_the_responses_that_it_gives_here(bucket, tmp_path):
    lines = [json.dumps(request(f"r{one}", f"June {one + 1}th 2020")) for one in range(8)]
    put(bucket, "batch/a.jsonl", "".join(f"{line}\n" for line in lines).encode())
    source = write_lines(tmp_path / "a.jsonl", *lines)
    here = tmp_path / "out.jsonl"
    local = generate("--model", demo_model_path(), "--input", source, "--output", here)
    remote = generate(*options("batch/*.jsonl", "out.jsonl"))
    assert (local.returncode, remote.returncode) == (0, 0), remote.stderr
    assert names(bucket, "")[-2:] == ["out.jsonl", "out.jsonl.manifest.json"]
    with bucket.open_input_file("out.jsonl") as file:
        (tmp_path / "copy.jsonl").write_bytes(file.readall())
    assert sorted(map(text_of, read_lines(tmp_path / "copy.jsonl"))) == sorted(
        map(text_of, read_lines(here))
    )


def text_of(response):
    message = response["response"]["body"]["choices"][0]["message"]
    return response["custom_id"], message["content"]


@pytest.mark.parametrize(
    ("source", "output", "reason"),
    [
        ("nothing/", "out", "s3://jobs/nothing cannot be listed: .*; check the path"),
        ("a.jsonl", "../no-such/out", "bucket does not exist; make the bucket"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(bucket, source, output, reason):
    put(bucket, "a.jsonl", b'{"prompt": "a"}\n')
    where = options(source, output)
    done = generate(*[str(one).replace("jobs/../", "") for one in where])
    assert done.returncode in (1, 2)
    assert re.search(reason, done.stderr.splitlines()[-1])
