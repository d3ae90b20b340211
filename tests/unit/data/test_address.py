"""Addresses where no cluster answers are refused in time, with what to do."""

import socket
import subprocess
import sys
import threading

import pytest

from raymoe.data import address
from raymoe.data.address import check_address
from raymoe.errors import ConfigError


@pytest.fixture
def place(monkeypatch, tmp_path):
    """The file that Ray leaves; nothing is in it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(address, "get_ray_address_file", lambda _: str(file))
    return file


@pytest.fixture
def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_without_an_address_a_ray_is_started(place, monkeypatch):
    check_address()
    monkeypatch.setenv("RAY_ADDRESS", "local")
    place.write_text("127.0.0.1:1")  # which `ray.init` does not read then
    check_address()


@pytest.mark.parametrize("kind", ["", "ray://"])
def test_an_address_of_a_cluster_that_has_ended_is_refused(place, monkeypatch, closed_port, kind):
    given = f"{kind}127.0.0.1:{closed_port}"
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(ConfigError) as refusal:
        check_address(timeout_s=0.1)
    text = str(refusal.value)
    assert f"RAY_ADDRESS is {given}" in text
    assert "refused" in text
    assert "unset it to start a Ray on this machine" in text


@pytest.mark.parametrize("variable", ["", "auto"])
def test_a_file_of_a_ray_that_was_killed_is_named(place, monkeypatch, closed_port, variable):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    place.write_text(f"127.0.0.1:{closed_port}\n")
    with pytest.raises(ConfigError) as refusal:
        check_address(timeout_s=0.1)
    assert f"{place} has the address 127.0.0.1:{closed_port}" in str(refusal.value)
    assert "remove the file" in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("http://127.0.0.1:8265", "is for `ray job submit`"),
        ("head", "is no HOST:PORT"),
        ("head:", "is no HOST:PORT"),
        ("127.0.0.1:99999", "no Ray cluster answers"),
        ("no-such-host.invalid:6379", "no Ray cluster answers"),
    ],
)
def test_what_cannot_be_an_address_is_refused(place, monkeypatch, given, reason):
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(ConfigError, match=reason):
        check_address(timeout_s=0.1)


def test_a_head_that_is_just_starting_is_waited_for(place, monkeypatch, closed_port):
    monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{closed_port}")
    monkeypatch.setattr(address, "RETRY_EVERY_S", 0.05)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def start() -> None:
            listener.bind(("127.0.0.1", closed_port))
            listener.listen()

        timer = threading.Timer(0.2, start)
        timer.start()
        check_address(timeout_s=10)
        timer.join()


SCRIPT = """
import os, socket
from raymoe.data.address import check_address
with socket.create_server(("127.0.0.1", 0)) as listener:
    os.environ["RAY_ADDRESS"] = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        check_address(timeout_s=1)
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_listener_that_is_no_cluster_does_not_hold_a_job():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False
    )
    assert "no Ray cluster answers there (nothing in 1 s)" in done.stdout
