"""examples/submit_job.py: the token it finds, and one sentence for each way of not being taken."""

import http.server
import importlib.util
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from ray.exceptions import AuthenticationError

PATH = Path(__file__).parents[3] / "examples" / "submit_job.py"
ADDRESS = "http://127.0.0.1:8265"
VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The example, on a machine without a token."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    specification = importlib.util.spec_from_file_location("submit_job", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_token_is_looked_for_where_ray_looks(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert script.where_the_token_is() is None
    default = tmp_path / ".ray" / "auth_token"
    default.parent.mkdir()
    default.write_text("0" * 32)
    assert script.where_the_token_is() == str(default)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"))
    assert script.where_the_token_is() is None  # Ray does not look further either
    (tmp_path / "other").write_text("1" * 32)
    assert script.where_the_token_is() == str(tmp_path / "other")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "2" * 32)
    assert script.where_the_token_is() == "RAY_AUTH_TOKEN"


UNAUTHORIZED = AuthenticationError("Authentication required: Unauthorized: Missing authentication")
FORBIDDEN = AuthenticationError("Authentication failed: Forbidden: Invalid authentication token")
TAKEN = RuntimeError(
    "Request failed with status code 500: Traceback (most recent call last):\n  File ...\n"
    "ValueError: Job with submission_id nightly already exists. Please use a different one.\n."
)
BROKEN = RuntimeError(
    "Request failed with status code 500: Traceback (most recent call last):\n  File ...\n"
    "RuntimeError: Failed to start Ray's job agent.\n."
)


@pytest.mark.parametrize(
    ("error", "token", "told"),
    [
        (UNAUTHORIZED, None, ["asks for a token and this machine has none", "RAY_AUTH_TOKEN"]),
        (FORBIDDEN, "/home/me/.ray/auth_token", ["refuses the token in /home/me/.ray/auth_token"]),
        (TAKEN, None, ["job nightly was submitted before", "ray job logs --follow"]),
        (BROKEN, None, ["could not take the job: RuntimeError: Failed to start Ray's job agent"]),
        (ConnectionError("refused"), None, ["no head answers", "ray dashboard cluster.yaml"]),
        (RuntimeError("Version check returned 404. Jobs API ..."), None, ["not the dashboard"]),
    ],
)
def test_a_failure_is_one_sentence(
    script: ModuleType, error: Exception, token: str | None, told: list[str]
) -> None:
    sentence = script.why_not_submitted(error, ADDRESS, token, "nightly")
    assert all(words in sentence for words in told), sentence
    assert "\n" not in sentence
    assert ADDRESS in sentence
    assert len(sentence) < 250


def test_what_is_not_known_keeps_its_traceback(script: ModuleType) -> None:
    assert script.why_not_submitted(KeyError("x"), ADDRESS, None, None) is None


@pytest.fixture
def locked() -> Iterator[str]:
    """The address of a server that wants a token."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_locked_head_answers_and_a_silent_one_does_not(
    script: ModuleType, locked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.check_that_somebody_answers(locked)
    monkeypatch.setattr(script, "ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(OSError, match="timed out"):
            script.check_that_somebody_answers(address)
    with pytest.raises(OSError, match="refused"):
        script.check_that_somebody_answers(address)
