"""`raymoe serve`: malformed requests, and batches, with and without `raymoe generate`."""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel

import raymoe
from raymoe.cli.generate import check_batch_options
from raymoe.data.generator import MoEGenerator
from raymoe.data.journal import journal_files
from raymoe.data.observer import METRICS
from raymoe.data.status import ActorStatus, RowCounts, make_status_directory, write_record
from raymoe.engine.outputs import EngineStats
from raymoe.openai.direct import IDLE_BEFORE_A_BATCH_S, REQUEST_ERROR_COLUMN, DirectRequests
from raymoe.openai.jobs import BatchWorker, Process
from raymoe.openai.store import ENDED, ApiError, Store
from tests.integration.test_cli_batch import request

uvicorn = pytest.importorskip("uvicorn")
from raymoe.openai.connections import ConnectionLimits, LimitedProtocol  # noqa: E402
from raymoe.openai.server import MAX_HEADER_BYTES, MAX_JSON_BYTES, Server  # noqa: E402

TOKEN = "a token of the tests"
MAX_FILE_BYTES = 20_000
ERROR_KEYS = frozenset(("message", "type", "param", "code"))
GENERATE = """
import json, pathlib, sys, time
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
mode, output = options["--mode"], pathlib.Path(options["--output"])
parts = pathlib.Path(f"{output}.partial")
parts.mkdir(exist_ok=True)
(parts / "part-000000-0.jsonl").touch()
done = {json.loads(line)["custom_id"] for part in parts.iterdir() for line in part.open()}
for number, text in enumerate(open(options["--input"])):
    line = json.loads(text)
    if line["custom_id"] in done:
        continue
    if (mode, number) in (("crash", 2), ("usage", 1)):
        print("error: bad", file=sys.stderr)
        sys.exit(1 if mode == "crash" else 2)
    status = 400 if line["custom_id"] == "bad" else 200
    answer = {"id": "x", "custom_id": line["custom_id"], "error": None}
    answer["response"] = {"status_code": status, "body": {"text": "a\\u2028b"}}
    path = parts / f"part-{number + 1:06}-{time.time_ns()}.jsonl"
    path.write_text(json.dumps(answer, ensure_ascii=False) + "\\n", encoding="utf-8")
    time.sleep(float(options["--pause"]))
with output.open("wb") as file:
    for part in sorted(parts.iterdir()):
        file.write(part.read_bytes())
for part in sorted(parts.iterdir()):
    part.unlink()
parts.rmdir()
"""


ENDLESS = [sys.executable, "-c", "import time; time.sleep(600)", "generate"]


class Running:
    """A server in a thread of this process."""

    def __init__(self, directory, *, token=None, command=("false",), generator=None, **limits):
        direct = DirectRequests(generator)
        self.store = Store(directory)
        self.worker = worker = BatchWorker(
            self.store, command, ["demo"], max_requests=1000, direct=direct,
            direct_status=limits.pop("direct_status", None),
        )  # fmt: skip
        sizes = {"max_file_bytes": limits.pop("max_file_bytes", MAX_FILE_BYTES)}
        app = Server(self.store, worker, ["demo"], token=token, **sizes)
        self.limits = ConnectionLimits(**limits)
        self.socket = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            app.application(), http=functools.partial(LimitedProtocol, self.limits), ws="none",
            log_level="critical", h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self.socket],))
        self._thread.start()

    def connections(self):
        return self._server.server_state.connections

    def close(self):
        self._server.should_exit = True
        self._thread.join()
        self.store.close()

    def send(self, data):
        """Return the status and the body that raw bytes are answered with."""
        with socket.create_connection(self.socket.getsockname(), timeout=300) as connection:
            with contextlib.suppress(OSError):  # the server may answer before it has read all
                connection.sendall(data)
            with connection.makefile("rb") as file:
                answer = file.read()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def call(self, method, path, body=b"", **headers):
        return self.send(http(method, path, body, **headers))


def http(method, path, body=b"", **headers):
    """Return the bytes of a request; a header is left out if it is None."""
    length = {"content_length": str(len(body))} if body or method == "POST" else {}
    headers = {"host": "localhost", **length, "connection": "close", **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if value]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


def form(*parts, end=True):
    """Return a multipart body and its header; a part is its header's parameters and content."""
    body = b"".join(
        b"--XX\r\nContent-Disposition: form-data" + head + b"\r\n\r\n" + content + b"\r\n"
        for head, content in parts
    )
    return body + (b"--XX--\r\n" if end else b""), "multipart/form-data; boundary=XX"


PURPOSE = (b'; name="purpose"', b"batch")
FILE = (b'; name="file"; filename="a.jsonl"', b'{"custom_id": "a"}\n')


def upload(content, **headers):
    body, kind = form(PURPOSE, (FILE[0], content))
    return http("POST", "/v1/files", body, content_type=kind, **headers)


def wrong_forms():
    for parts in [
        (), (PURPOSE,), (FILE,), (PURPOSE, FILE, FILE), (PURPOSE, PURPOSE, FILE),
        (PURPOSE, (FILE[0], b"")), (PURPOSE, (b'; name="file"', b"text")),
        ((PURPOSE[0], b"fine-tune"), FILE), ((PURPOSE[0], b""), FILE), ((PURPOSE[0], b"\xff"),
        FILE),
        ((b'; name="purpose"; filename="p"', b"batch"), FILE), (PURPOSE, (b"", b"x")),
        (PURPOSE, FILE, (b'; name="expires_after[seconds]"', b"3600")),
        (PURPOSE, FILE, *[(f'; name="f{i}"'.encode(), b"") for i in range(20)]),
        (PURPOSE, (b'; name="../file"; filename="x"', b"x")), (PURPOSE, (b"; name=" + b"n" * 9000,
        b"")),
        ((PURPOSE[0], b"b" * 5000), FILE), (PURPOSE, (FILE[0], b"x" * (MAX_FILE_BYTES + 1))),
    ]:  # fmt: skip
        yield form(*parts)
    body, kind = form(PURPOSE, FILE)
    yield body[:-8], kind
    yield body[: len(body) // 2], kind
    yield form(PURPOSE, FILE, end=False)
    yield body.replace(b"\r\n", b"\n"), kind
    yield body.replace(b"form-data", b"attachment", 2).replace(b"name=", b"nom="), kind
    for other in [
        None, "", "text/plain", "application/json", "multipart/form-data",
        "multipart/mixed; boundary=XX",
        "multipart/form-data; boundary=YY", "multipart/form-data; boundary=",
        "multipart/form-data; XX",
        f"multipart/form-data; boundary={'b' * 5000}", "application/x-www-form-urlencoded",
    ]:  # fmt: skip
        yield body, other
    chaos = random.Random(3)
    for length in [1, 2, 7, 60, 500, 5000]:
        yield chaos.randbytes(length), kind
        yield b"--XX\r\n" + chaos.randbytes(length), kind
        yield body[:40] + chaos.randbytes(length) + body[40:], kind


def wrong_batches(file_id):
    good = {
        "input_file_id": file_id,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    yield from [
        b"", b"{", b"[]", b"null", b"3", b'"text"', b"\xff\xfe", b"{}" * 2, b"\x00", b"{'a': 1}",
        b"[" * 100_000, b'{"a":' * 50_000, b'{"x": ' + b"9" * 5000 + b"}", b"{}", b"nul",
        b"\xef\xbb\xbf{}",
    ]  # fmt: skip
    for name in good:
        yield json.dumps({key: value for key, value in good.items() if key != name}).encode()
        for value in [None, "", 3, True, [], {}, "\ud800", "x" * 3000, "../../etc/passwd", "a\0b"]:
            yield json.dumps(good | {name: value}).encode()
    for metadata in [
        3, "x", [], [["a", "b"]], {"a": 1}, {"a": None}, {"a": {}}, {"k" * 65: ""},
        {"a": "v" * 513},
        {str(i): "" for i in range(17)},
    ]:  # fmt: skip
        yield json.dumps(good | {"metadata": metadata}).encode()
    yield json.dumps(good | {"output_expires_after": {"anchor": "created_at"}}).encode()
    yield json.dumps(good | {"endpoint": "/v1/embeddings"}).encode()
    yield json.dumps(good | {"completion_window": "24 h"}).encode()
    yield json.dumps(good | {"surplus": "x" * MAX_JSON_BYTES}).encode()


def wrong_paths(file_id, batch_id):
    ids = [
        "x", "file-", "..", ".", "%2e%2e", "..%2f..%2fserver.lock", "%00", "file-" + "0" * 32,
        file_id.upper(),
        file_id + "%0a", file_id[:-1], "file-" + "g" * 32, batch_id, "a" * 3000, "%ff%fe", "%",
        "%zz", "*", "~",
    ]  # fmt: skip
    for one in ids:
        yield "GET", f"/v1/files/{one}"
        yield "GET", f"/v1/files/{one}/content"
    for one in [*ids[:6], file_id]:
        yield "DELETE", f"/v1/files/{one}"[: None if one != file_id else -1]
        yield "GET", f"/v1/batches/{one}"
        yield "POST", f"/v1/batches/{one}/cancel"
    for path in ["/", "/v1", "/v2/files", "/v1/files/", "//v1/files", "/v1/embeddings",
    "/etc/passwd",
                 "/v1/files/../../etc/passwd", "/v1/models/other", "/v1/models/%00"]:  # fmt: skip
        yield "GET", path
    for method in ("PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "BREW"):
        yield method, "/v1/batches"
    for query in ["limit=0", "limit=-1", "limit=x", "limit=101", "limit=" + "9" * 4000, "after=x",
    "after=",
                  "order=asc", "limit=%D9%A3", "surplus"]:  # fmt: skip
        yield "GET", f"/v1/batches?{query}"
    yield "GET", "/v1/files?order=up"


def wrong_heads():
    yield from (b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
    yield from (b"GET /v1/files\r\n\r\n", b"GET /v1/files HTTP/9.9\r\n\r\n")
    yield from (b"GET /v1/files HTTP/1.1\r\n\r\n", b"GET  /v1/files HTTP/1.1\r\nhost: a\r\n\r\n")
    yield http("GET", "/v1/files", x="y" * MAX_HEADER_BYTES)
    yield http("GET", "/v1/files", **{f"x_{i}": "y" * 100 for i in range(180)})
    yield http("GET", "/v1/files?" + "q" * 17_000)
    yield b"GET /v1/files HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n"
    yield b"GET /v1/files HTTP/1.1\r\nhost: localhost\r\nx: a\x00b\r\n\r\n"
    for length in ("-1", "x", "1e3", "9" * 30, "+5"):
        yield http(
            "POST", "/v1/batches", b"{}", content_type="application/json", content_length=length
        )
    yield http("POST", "/v1/files", b"", content_type="multipart/form-data; boundary=XX",
               content_length=str(10**12))  # fmt: skip
    chunks = b"zz\r\n{}\r\n0\r\n\r\n"
    yield http("POST", "/v1/batches", chunks, content_type="application/json", content_length=None,
               transfer_encoding="chunked")  # fmt: skip
    for kind in (None, "text/plain", "application/jsonl", "application/x-www-form-urlencoded"):
        yield http("POST", "/v1/batches", b"{}", content_type=kind)


def snapshot(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# Of files that Starlette opened for a form that ends too early.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_hundreds_of_malformed_requests_are_refused_and_harm_nothing(tmp_path):
    server = Running(tmp_path)
    try:
        status, body = server.send(upload(b"one\n"))
        assert status == 200
        file_id = json.loads(body)["id"]
        batch = server.store.add_batch(
            endpoint="/v1/chat/completions", input_file_id=file_id, completion_window="24h"
        )
        wait_for(server.store, batch.id)
        before = snapshot(tmp_path)
        requests = [
            http("POST", "/v1/files", body, content_type=kind) for body, kind in wrong_forms()
        ]
        requests += [
            http("POST", "/v1/batches", body, content_type="application/json")
            for body in wrong_batches(file_id)
        ]
        requests += [http(*one) for one in wrong_paths(file_id, batch.id)]
        requests += wrong_heads()
        for host in ("example.com", "127.0.0.1.example.com", "10.0.0.1", "", "localhost:x", "[::1"):
            requests.append(http("GET", "/v1/files", host=host or "\t"))
        requests += [http("GET", "/v1/files", origin=one) for one in ("null", "http://localhost")]
        assert len(requests) > 200
        answers = [(sent[:300], *server.send(sent)) for sent in requests]
        assert [one for one in answers if not 400 <= one[1] < 500] == []
        # What is no HTTP never gets to the application.
        bodies = {body for *_, body in answers if b"Invalid HTTP request" not in body}
        errors = [json.loads(body)["error"] for body in bodies]
        assert {frozenset(error) for error in errors} == {ERROR_KEYS}
        assert snapshot(tmp_path) == before
        assert server.call("GET", f"/v1/files/{file_id}/content") == (200, b"one\n")
        assert server.call("GET", "/v1/batches", host="[::1]:80")[0] == 200
    finally:
        server.close()


def test_only_the_token_opens_a_server_that_has_one(tmp_path):
    server = Running(tmp_path, token=TOKEN)
    try:
        wrong = [None, "", TOKEN, "Bearer", "Bearer ", f"Bearer {TOKEN} ", f"bearer {TOKEN}",
        "Bearer x",
                 f"Basic {TOKEN}", f"Bearer  {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}",
                 "Bearer \xff\xfe"]  # fmt: skip
        for value in wrong[:5] + wrong[6:]:  # spaces at the end of a header do not count
            for sent in (
                http("GET", "/v1/models", authorization=value),
                upload(b"x", authorization=value),
            ):
                status, body = server.send(sent)
                assert status == 401, value
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
        right = {"authorization": f"Bearer {TOKEN}", "host": "example.com", "origin": "http://a"}
        assert server.call("GET", "/v1/models", **right)[0] == 200
        assert server.store.files() == []
    finally:
        server.close()


def test_a_probe_needs_no_token_and_sees_nothing_but_the_health(tmp_path):
    server = Running(tmp_path, token=TOKEN)
    try:
        assert server.call("GET", "/health", host="10.0.0.1:8000") == (200, b'{"status": "ok"}')
        for path in ("/metrics", "/health/", "/v1/batches", "//health"):
            assert server.call("GET", path, host="10.0.0.1:8000")[0] == 401
        assert server.call("GET", "/metrics", authorization=f"Bearer {TOKEN}")[0] == 200
        ended = threading.Thread(target=int)
        ended.start()
        ended.join()
        server.worker._threads.append(ended)
        status, body = server.call("GET", "/health")
        assert status == 503
        assert "has ended; the log" in json.loads(body)["reason"]
        server.worker._threads.remove(ended)
    finally:
        server.close()


SERIES = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\]|\\.)*",?)+)\} ([\d.e+]+)')


def test_prometheus_reads_batches_and_engines(tmp_path):
    engine = EngineStats(**{one.name: 3 for one in dataclasses.fields(EngineStats)})
    rows = RowCounts(num_rows=7, num_error_rows=2, errors=(("ConfigError", 2),))
    status = ActorStatus(
        actor="node-1", node="node", pid=1, model='/models/a "b"', state="running",
        started_unix_s=1.0, updated_unix_s=2.0, rows=rows, engine=engine,
    )  # fmt: skip
    write_record(make_status_directory(tmp_path / "status") / "actor-1.json", status)
    server = Running(tmp_path / "dir", direct_status=tmp_path / "status")
    try:
        wait_for(server.store, add(server.store, ["\n"]))
        code, body = server.call("GET", "/metrics")
    finally:
        server.close()
    assert code == 200
    lines = body.decode().splitlines()
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    found = [SERIES.fullmatch(line).groups() for line in lines if not line.startswith("#")]
    assert {name for name, *_ in found} == kinds.keys()
    series = {(name, labels): float(value) for name, labels, value in found}
    assert series["raymoe_batches", 'status="failed"'] == 1
    tags = r'model="a \"b\"",actor="node-1"'
    assert series["raymoe_rows_total", tags] == 7
    assert series["raymoe_error_rows_total", f'{tags},kind="ConfigError"'] == 2
    assert series["raymoe_queued_rows", tags] == 3
    assert (kinds["raymoe_rows_total"], kinds["raymoe_queued_rows"]) == ("counter", "gauge")
    assert len(kinds) == len(METRICS) + 2


def test_the_log_has_a_line_when_a_batch_comes_starts_and_ends(stand_in, caplog):
    caplog.set_level(logging.INFO, logger="raymoe.openai")
    store, _ = stand_in()
    good = wait_for(store, add(store, [request(one) for one in ("a", "bad", "c")]))
    wrong = wait_for(store, add(store, [request("a"), request("a")]))
    expected = [
        f"{good.id}: received, 3 requests",
        f"{good.id}: started, 3 requests",
        f"{good.id}: finished, 2 answers and 1 errors in \\d+ s",
        f"{wrong.id}: refused, 1 lines are wrong; the first error: line 2: 'a' occurs twice",
    ]
    deadline_s = time.monotonic() + 10  # a record changes before its line is written
    while len(caplog.messages) < len(expected) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    for pattern, message in zip(expected, sorted(caplog.messages, key=_place), strict=True):
        assert re.fullmatch(pattern, message)


def _place(message):
    return ["received", "started", "finished", "refused"].index(message.split()[1].strip(",:"))


def wait_for(store, batch_id, done=lambda batch: batch.status in ENDED, timeout_s=60):
    deadline_s = time.monotonic() + timeout_s
    while not done(store.batch(batch_id)):
        assert time.monotonic() < deadline_s, store.batch(batch_id)
        time.sleep(0.02)
    return store.batch(batch_id)


@pytest.fixture
def stand_in(tmp_path):
    """Return a function that starts store and worker with a stand-in for `raymoe generate`.

    Called again, it ends the ones before, as a server does that is told to stop.
    """
    script, opened = tmp_path / "generate.py", []
    script.write_text(GENERATE)

    def stop():
        for store, worker in opened:
            worker.stop()
            store.close()
        opened.clear()

    def start(mode="run", pause=0.0):
        stop()
        store = Store(tmp_path / "dir")
        command = [sys.executable, script, "generate", "--mode", mode, "--pause", pause]
        worker = BatchWorker(
            store, [*map(str, command)], ["demo"], max_requests=50, direct=DirectRequests(None)
        )
        worker.start()
        opened.append((store, worker))
        return store, worker

    yield start
    stop()


def add(store, lines):
    path = store._files_dir / "new"
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    with path.open("rb") as file:
        record = store.add_file(file, "in.jsonl")
    path.unlink()
    return store.add_batch(
        endpoint="/v1/chat/completions", input_file_id=record.id, completion_window="24h"
    ).id


def read(store, file_id):
    return [] if file_id is None else store.content(file_id).read_text("utf-8").splitlines()


def ids_of(store, batch):
    lines = read(store, batch.output_file_id) + read(store, batch.error_file_id)
    return [json.loads(line)["custom_id"] for line in lines]


def test_a_batch_becomes_two_files_and_leaves_nothing_else(stand_in, tmp_path):
    store, _ = stand_in()
    batch = wait_for(store, add(store, [request(one) for one in ("a", "bad", "c")]))
    assert (batch.status, batch.num_total, batch.num_completed, batch.num_failed) == (
        "completed",
        3,
        2,
        1,
    )
    assert [json.loads(line)["custom_id"] for line in read(store, batch.output_file_id)] == [
        "a",
        "c",
    ]
    assert [json.loads(line)["custom_id"] for line in read(store, batch.error_file_id)] == ["bad"]
    assert not (tmp_path / "dir" / "batches" / batch.id).exists()
    with pytest.raises(raymoe.ConfigError, match="used by another server"):
        Store(tmp_path / "dir")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{broken\n", "invalid_json_line"), ("[]\n", "invalid_json_line"),
        ("[" * 100_000 + "\n", "invalid_json_line"), (request(""), "invalid_custom_id"),
        (request("x" * 513), "invalid_custom_id"), (request("\ud800"), "invalid_custom_id"),
        (request(7), "invalid_custom_id"), (request("a"), "duplicate_custom_id"),
        (request("b") | {"method": "GET"}, "invalid_method"), (request("b") | {"body": "x"},
        "invalid_body"),
        (request("b", url="/v1/completions"), "invalid_url"), (request("b", model="gpt"),
        "model_not_found"),
    ],
)  # fmt: skip
def test_a_batch_with_a_line_of_another_form_fails_before_it_runs(stand_in, line, code):
    store, _ = stand_in()
    batch = wait_for(store, add(store, [request("a"), "\n", line]))
    assert batch.status == "failed"
    assert [(error.code, error.line) for error in batch.errors] == [(code, 3)]


def test_a_batch_with_too_few_or_many_lines_fails(stand_in):
    store, _ = stand_in()
    for lines, code in (
        ([" \n"], "empty_file"),
        ([request(str(i)) for i in range(51)], "too_many_requests"),
    ):
        batch = wait_for(store, add(store, lines))
        assert [error.code for error in batch.errors] == [code]


@pytest.mark.slow
def test_what_was_done_before_a_crash_or_cancel_is_kept(stand_in):
    store, _ = stand_in("crash")
    batch = wait_for(store, add(store, requests_of(5)))
    assert batch.status == "failed"
    assert "bad; 2 of 5 requests have a response" in batch.errors[0].message
    assert ids_of(store, batch) == ["0", "1"]
    store, worker = stand_in(pause=0.5)
    first, second = (add(store, requests_of(50)) for _ in range(2))
    wait_for_parts(store, first)
    wait_for(store, second, lambda batch: batch.status == "in_progress")
    assert worker.cancel(second).status == "cancelled"  # it waits for its turn
    assert worker.cancel(first).status == "cancelling"
    batch = wait_for(store, first)
    assert batch.status == "cancelled"
    found = ids_of(store, batch)
    assert 3 <= len(found) < 50
    assert found == [str(i) for i in range(len(found))]
    with pytest.raises(ApiError, match="is completed and cannot be cancelled"):
        worker.cancel(wait_for(store, add(store, requests_of(1))).id)


def test_wrong_options_of_the_command_fail_at_once(stand_in):
    store, _ = stand_in("usage")
    batch = wait_for(store, add(store, requests_of(3)))
    assert batch.errors[0].message.startswith("bad; 1 of 3 requests")


def test_a_server_that_starts_again_goes_on(stand_in, tmp_path):
    store, _ = stand_in(pause=0.1)
    batch_id = add(store, requests_of(20))
    wait_for_parts(store, batch_id)
    store, _ = stand_in(pause=0.05)
    assert store.batch(batch_id).status == "in_progress"
    assert ids_of(store, wait_for(store, batch_id)) == [str(i) for i in range(20)]


def test_a_server_that_starts_again_finds_the_process_of_the_one_before(tmp_path):
    (tmp_path / "generate.py").write_text(GENERATE)
    command = [
        sys.executable,
        str(tmp_path / "generate.py"),
        "generate",
        "--mode",
        "run",
        "--pause",
    ]
    store = Store(tmp_path / "dir")
    batch_id = add(store, requests_of(20))
    work = store.work_dir(batch_id)
    work.mkdir()
    files = ["--input", str(store.content(store.batch(batch_id).input_file_id)), "--output"]
    output = work / "responses.jsonl"
    earlier = Process.start([*command, "0.1", *files, str(output)], tmp_path / "log")
    wait_for_parts(store, batch_id)
    worker = BatchWorker(
        store, [*command, "0"], ["demo"], max_requests=50, direct=DirectRequests(None)
    )
    worker.start()
    try:
        wait_for(store, batch_id, lambda batch: batch.status == "in_progress")
        assert ids_of(store, wait_for(store, batch_id)) == [str(i) for i in range(20)]
        assert not earlier.is_alive()
        assert earlier.code == 0
    finally:
        worker.stop()
        store.close()


def requests_of(number):
    return [request(str(index)) for index in range(number)]


def wait_for_parts(store, batch_id):
    parts = store.work_dir(batch_id) / "responses.jsonl.partial"
    wait_for(store, batch_id, lambda _: len(list(parts.glob("*"))) > 3)


def test_requests_at_once_share_an_engine_until_a_batch_wants_the_machine(tmp_path):
    arguments = ["--model", str(raymoe.demo_model_path()), "--temperature", "0"]
    options, config = check_batch_options(arguments)
    options |= {
        "engine_config": config,
        "id_column": "custom_id",
        "error_column": REQUEST_ERROR_COLUMN,
    }
    made = []

    def make():
        made.append(MoEGenerator(raymoe.demo_model_path(), **options))
        return made[-1]

    server = Running(tmp_path, generator=make, command=ENDLESS)

    def ask(url, prompt, **changes):
        body = request("", prompt, url=url)["body"] | changes
        return server.call("POST", url, json.dumps(body).encode(), content_type="application/json")

    def text(answered):
        choice = json.loads(answered[1])["choices"][0]
        return choice["message"]["content"] if "message" in choice else choice["text"]

    prompts = [f"date: {day} May 2021 ->" for day in range(1, 21)]
    try:
        with ThreadPoolExecutor(20) as pool:
            answers = [*pool.map(lambda prompt: ask("/v1/completions", prompt), prompts)]
            chats = [*pool.map(lambda prompt: ask("/v1/chat/completions", prompt), prompts)]
        assert [status for status, _ in answers + chats] == [200] * 40
        assert [*map(text, answers)] == [f"2021-05-{day:02}" for day in range(1, 21)]
        assert len({json.loads(body)["id"] for _, body in answers}) == 20
        drawn = {"temperature": 2.0, "seed": 5, "max_tokens": 40}
        assert len({text(ask("/v1/completions", prompts[0], **drawn)) for _ in range(3)}) == 1
        for wrong, status in (({"stream": True}, 400), ({"model": "gpt"}, 404), ({"n": -1}, 400)):
            assert ask("/v1/completions", "x", **wrong)[0] == status
        assert ask("/v1/completions", "x" * 9000)[0] == 400
        assert len(made) == 1
        batch_id = add(server.store, requests_of(2))
        deadline_s = time.monotonic() + 60
        while (answered := ask("/v1/completions", "x"))[0] == 200:
            assert time.monotonic() < deadline_s
            time.sleep(IDLE_BEFORE_A_BATCH_S + 1)
        assert answered[0] == 503
        assert f"{batch_id} runs" in json.loads(answered[1])["error"]["message"]
    finally:
        server.close()


@contextlib.contextmanager
def served(directory, *options):
    """`raymoe serve` in a process of its own, killed at the end."""
    command = [
        sys.executable, "-m", "raymoe", "serve", "--model", raymoe.demo_model_path(),
        "--served-model-name", "demo", "--directory", directory, "--port", 0, *options,
    ]  # fmt: skip
    root = str(Path(raymoe.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    process = subprocess.Popen([*map(str, command)], env=environment, stderr=subprocess.PIPE)
    try:
        ready = re.compile(r"listening at (\S+) for model demo")  # after what it loads
        found = next(filter(None, (ready.match(line.decode()) for line in process.stderr)))
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def poll(client, batch_id, done=lambda batch: batch.status in ENDED, timeout_s=400):
    deadline_s = time.monotonic() + timeout_s
    while not done(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.5)
    return batch


@pytest.mark.slow
@pytest.mark.ray
def test_the_openai_client_gets_each_id_once_also_when_the_server_is_killed(tmp_path):
    openai = pytest.importorskip("openai")
    lines = [
        request(f"r{i}", f"{i % 28 + 1} June {1900 + i % 100}", stream=i % 100 == 7)
        for i in range(1000)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (tmp_path / "token").write_text(TOKEN)
    options = ("--token-file", tmp_path / "token")

    def connect(url):
        return openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0)

    kwargs = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with served(tmp_path / "dir", *options) as (_, url):
        client = connect(url)
        assert [model.id for model in client.models.list()] == ["demo"]
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="another").models.list()
        uploaded = client.files.create(file=("in.jsonl", content), purpose="batch")
        assert client.files.wait_for_processing(uploaded.id).bytes == len(content)
        assert client.files.content(uploaded.id).read() == content
        batch = client.batches.create(input_file_id=uploaded.id, metadata={"a": "b"}, **kwargs)
        expected = check_files(client, poll(client, batch.id), lines)
    for dies in ("server and job", "server"):
        with served(tmp_path / "dir", *options) as (server, url):
            batch = connect(url).batches.create(input_file_id=uploaded.id, **kwargs)
            output = tmp_path / "dir" / "batches" / batch.id / "responses.jsonl"
            wait_for_journal(output.with_name("responses.jsonl.journal"))
            server.kill()
            if dies != "server":
                os.killpg(Process.find(output).pid, signal.SIGKILL)
        with served(tmp_path / "dir", *options) as (_, url):
            client = connect(url)
            assert client.batches.retrieve(batch.id).status == "in_progress"
            assert check_files(client, poll(client, batch.id), lines) == expected
    with served(tmp_path / "dir", *options) as (_, url):
        client = connect(url)
        assert len(list(client.batches.list(limit=1))) == 3
        client.files.delete(uploaded.id)
        with pytest.raises(openai.NotFoundError):
            client.files.content(uploaded.id)


class Day(BaseModel):
    month: Literal["May", "June"]
    is_late: bool | None


@pytest.mark.slow
def test_the_openai_client_parses_answers_as_a_class(tmp_path):
    openai = pytest.importorskip("openai")
    with served(tmp_path / "dir") as (_, url):
        parse = openai.OpenAI(base_url=url, api_key="none", max_retries=0).chat.completions.parse
        asked = {
            "model": "demo", "messages": [{"role": "user", "content": "x"}], "response_format": Day,
        }  # fmt: skip
        message = parse(max_tokens=300, **asked).choices[0].message
        assert message.parsed == Day.model_validate_json(message.content)
        assert message.refusal is None
        with pytest.raises(openai.LengthFinishReasonError):
            parse(max_tokens=3, **asked)


def wait_for_journal(directory):
    """Wait until some of the 1,000 rows are finished, of about 80 bytes each."""
    deadline_s = time.monotonic() + 300
    while sum(path.stat().st_size for path in journal_files(directory)) < 10_000:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def check_files(client, batch, lines):
    counts = batch.request_counts
    assert batch.status == "completed"
    assert (counts.total, counts.completed, counts.failed) == (1000, 990, 10)
    good, bad = (
        [json.loads(line) for line in client.files.content(one).text.splitlines()]
        for one in (batch.output_file_id, batch.error_file_id)
    )
    assert sorted(one["custom_id"] for one in good + bad) == sorted(
        one["custom_id"] for one in lines
    )
    assert {one["response"]["status_code"] for one in bad} == {400}
    return {one["custom_id"]: one["response"]["body"]["choices"] for one in good}
