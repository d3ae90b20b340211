"""Clients that are slow, many, or strangers, over real sockets."""

import contextlib
import itertools
import json
import os
import select
import socket
import threading
import time

import pytest

pytest.importorskip("uvicorn")
from raymoe.openai.connections import MIN_BODY_BYTES
from tests.integration.test_serve import FILE, PURPOSE, Running, form, http, upload

TOKEN = "a token of the tests"
TIMEOUT_S = 0.3
HEALTH = http("GET", "/health", connection="keep-alive")


@pytest.fixture
def serve(tmp_path):
    running = []

    def start(**options):
        running.append(Running(tmp_path / "server", **{"timeout_s": TIMEOUT_S, **options}))
        return running[-1]

    yield start
    for one in running:
        one.close()


def connect(server):
    return contextlib.closing(socket.create_connection(server.socket.getsockname(), timeout=20))


def answered(connection):
    """Return the answer of /health."""
    got = b""
    while not got.endswith(b'{"status": "ok"}') and (data := connection.recv(1000)):
        got += data
    return got


def until_closed(connection, drip=b"", pause_s=0.02):
    """Send a byte again and again; return what came back, and after how many seconds it ended."""
    begin_s, got = time.monotonic(), b""
    while time.monotonic() < begin_s + 20:
        try:
            if drip:
                connection.send(drip)
            if select.select([connection], [], [], pause_s)[0]:
                data = connection.recv(1 << 16)
                if not data:
                    break
                got += data
        except OSError:
            break
    return got, time.monotonic() - begin_s


HEAD = b"POST /v1/batches HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
SLOW = {
    "nothing at all": (b"", b""),
    "a header that never ends": (b"GET /health HTTP/1.1\r\nx: ", b"y"),
    "a body that never ends": (HEAD + b"content-length: 9999999\r\n\r\n", b" "),
    "chunks that never end": (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "a form that never ends": (upload(b"x" * 9999)[:-500], b""),
    "the rest of a refused body": (
        HEAD + b"origin: x\r\ncontent-length: 9999\r\n\r\n",
        b" ",
    ),
}


@pytest.mark.parametrize("kind", SLOW)
def test_a_slow_client_is_cut_and_told(serve, kind):
    server = serve()
    begin, drip = SLOW[kind]
    with connect(server) as connection:
        connection.sendall(begin)
        got, seconds = until_closed(connection, drip)
    assert TIMEOUT_S * 0.9 <= seconds < 10
    if kind == "nothing at all":
        assert got == b""
    elif kind != "the rest of a refused body":
        assert got.startswith(b"HTTP/1.1 408 ")
        assert "message" in json.loads(got.partition(b"\r\n\r\n")[2])["error"]
    assert server.call("GET", "/health")[0] == 200


def test_a_slow_header_after_a_good_request_is_cut_too(serve):
    with connect(serve()) as connection:
        connection.sendall(HEALTH)
        assert answered(connection).startswith(b"HTTP/1.1 200")
        got, seconds = until_closed(connection, b"x")
    assert got.startswith(b"HTTP/1.1 408 ")
    assert seconds < 10


def test_a_client_that_does_not_read_is_cut(serve):
    server = serve(max_file_bytes=1 << 25)
    file_id = json.loads(server.send(upload(b"x" * (1 << 24)))[1])["id"]
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(http("GET", f"/v1/files/{file_id}/content"))
        deadline_s = time.monotonic() + 10
        while server.connections() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not server.connections()


def test_a_body_that_comes_steadily_is_not_cut(serve):
    server = serve(max_file_bytes=1 << 20)
    data = upload(b"x" * (MIN_BODY_BYTES * 12))
    with connect(server) as connection:
        for begin in range(0, len(data), MIN_BODY_BYTES):
            connection.sendall(data[begin : begin + MIN_BODY_BYTES])
            time.sleep(TIMEOUT_S / 4)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_an_answer_that_takes_long_is_waited_for(serve, monkeypatch):
    server = serve(max_file_bytes=1 << 20)
    add_file = server.store.add_file
    monkeypatch.setattr(
        server.store, "add_file", lambda *a: time.sleep(4 * TIMEOUT_S) or add_file(*a)
    )
    assert server.send(upload(b"x"))[0] == 200


@pytest.mark.parametrize("token", [None, TOKEN])
def test_strangers_cannot_keep_others_out(serve, token):
    server = serve(token=token, timeout_s=20.0, max_strangers=8)
    allowed = {"authorization": f"Bearer {token}"} if token else {}
    with contextlib.ExitStack() as stack:
        friend = stack.enter_context(connect(server))
        friend.sendall(http("GET", "/health", connection="keep-alive", **allowed))
        assert answered(friend).startswith(b"HTTP/1.1 200")
        strangers = [stack.enter_context(connect(server)) for _ in range(40)]
        for one in strangers[::2]:  # and those that are refused are strangers still
            with contextlib.suppress(OSError):
                one.sendall(http("GET", "/health", connection="keep-alive", origin="http://x",
                                 authorization="Bearer wrong"))  # fmt: skip
        assert server.call("GET", "/health", **allowed)[0] == 200
        assert len(server.limits.strangers) <= 8
        friend.sendall(http("GET", "/health", **allowed))
        assert answered(friend).startswith(b"HTTP/1.1 200")
        assert until_closed(strangers[0])[1] < 5


def test_a_full_server_says_so(serve):
    server = serve(timeout_s=20.0, max_connections=3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            one = stack.enter_context(connect(server))
            one.sendall(HEALTH)
            assert answered(one).startswith(b"HTTP/1.1 200")
        status, body = server.call("GET", "/health")
        assert status == 503
        assert "3 connections, which is its limit" in json.loads(body)["error"]["message"]
    deadline_s = time.monotonic() + 10
    while server.call("GET", "/health")[0] != 200:
        assert time.monotonic() < deadline_s


PAGES = {
    "another origin": {"origin": "https://evil.example"},
    "a picture of another site": {"sec-fetch-site": "cross-site"},
    "a page of another port": {"sec-fetch-site": "same-site"},
    "a page in a frame": {"sec-fetch-site": "same-origin"},
    "a link": {"referer": "https://evil.example/page"},
    "a name that was bound anew": {"host": "evil.example:8000"},
    "a name that looks like ours": {"host": "localhost.evil.example"},
    "no name": {"host": ""},
}


def test_web_pages_read_nothing(serve):
    server = serve()
    file_id = json.loads(server.send(upload(b"secret"))[1])["id"]
    paths = ["/v1/files", f"/v1/files/{file_id}/content", "/v1/batches", "/v1/models", "/health"]
    for kind, path in itertools.product(PAGES, paths):
        headers = {name.replace("-", "_"): value for name, value in PAGES[kind].items()}
        status, body = server.call("GET", path, **headers)
        assert status in {400, 403}, (kind, path)
        assert b"secret" not in body


def test_a_user_may_type_the_address(serve):
    assert serve().call("GET", "/v1/files", sec_fetch_site="none")[0] == 200


@pytest.mark.slow
def test_a_large_upload_and_large_json_stop_no_other_request(serve):
    server = serve(max_file_bytes=1 << 28, timeout_s=30.0)
    body, kind = form(PURPOSE, (FILE[0], b'{"x": "' + b"y" * (100 << 20) + b'"}'))
    sending = threading.Thread(
        target=server.send, args=(http("POST", "/v1/files", body, content_type=kind),)
    )
    text = b'{"model": [' + b"1," * (7 << 20) + b"1]}"  # 14 MiB, of very many values
    parsing = threading.Thread(
        target=server.call, args=("POST", "/v1/chat/completions", text),
        kwargs={"content_type": "application/json"},
    )  # fmt: skip
    slowest_s = 0.0
    for thread in (sending, parsing):
        thread.start()
        while thread.is_alive():
            begin_s = time.monotonic()
            assert server.call("GET", "/health")[0] == 200
            slowest_s = max(slowest_s, time.monotonic() - begin_s)
        thread.join()
    assert slowest_s < 3.0


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(serve):
    server = serve()
    for data in (
        http("POST", "/v1/chat/completions", b"{}", content_type="application/json",
             content_length=str(10**9), expect="100-continue"),
        http("POST", "/v1/chat/completions", b"{}", content_type="application/json",
             content_encoding="gzip"),
    ):  # fmt: skip
        status, body = server.send(data)
        assert status in {413, 415}
        assert json.loads(body)["error"]["message"]


def test_requests_that_could_be_two_are_one_and_the_last(serve):
    server = serve()
    second = b"GET /v1/files HTTP/1.1\r\nhost: localhost\r\n\r\n"
    both = b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    for begin in (
        HEAD + both, HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: -2\r\n\r\n{}",
    ):  # fmt: skip
        with connect(server) as connection:
            connection.sendall(begin + second)
            got, _ = until_closed(connection)
        assert (got[:12], got.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 400", 1), begin


def test_what_is_no_content_of_a_file_is_not_sent(serve, tmp_path):
    server = serve()
    file_id = json.loads(server.send(upload(b"x"))[1])["id"]
    path = tmp_path / "server" / "files" / f"{file_id}.jsonl"
    (tmp_path / "secret").write_text("secret")
    path.unlink()
    for make, said in [(lambda: None, b"is gone"), (lambda: os.mkfifo(path), b"is a pipe"),
                       (lambda: path.symlink_to(tmp_path / "secret"), b"is a link")]:  # fmt: skip
        make()
        status, body = server.call("GET", f"/v1/files/{file_id}/content")
        assert (status, said in body) == (500, True), body
        path.unlink(missing_ok=True)
    body, kind = form(PURPOSE, FILE)
    data = http("POST", "/v1/files", body, content_type=kind, content_encoding="gzip")
    assert server.send(data)[0] == 415
