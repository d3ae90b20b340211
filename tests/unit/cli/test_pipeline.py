"""What a command does before it starts Ray."""

import logging
import os

import pytest

from raymoe.cli.pipeline import TOKEN_VARIABLE, _ensure_token


@pytest.fixture
def variables(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "")  # so that the test's end restores it
    for name in (TOKEN_VARIABLE, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("home", ["/proc/none", "/dev/null"])
def test_without_a_home_to_write_to_the_token_of_ray_is_in_the_environment(home, variables, caplog):
    variables.setenv("HOME", home)
    with caplog.at_level(logging.WARNING):
        _ensure_token()
    (record,) = caplog.records
    assert "no home to write to ([Errno" in record.message
    assert len(os.environ[TOKEN_VARIABLE]) == 64


def test_elsewhere_ray_writes_its_token_as_always(variables, tmp_path):
    variables.setenv("HOME", str(tmp_path))
    _ensure_token()
    assert TOKEN_VARIABLE not in os.environ
    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        variables.setenv("HOME", "/proc/none")
        variables.setenv(name, "disabled")
        _ensure_token()
        assert TOKEN_VARIABLE not in os.environ
