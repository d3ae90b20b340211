"""Manifests of jobs for tests."""

import dataclasses
from concurrent.futures import Future
from pathlib import Path

from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.manifest import Manifest
from raymoe.engine.identity import ModelIdentity


class Identity(ModelIdentity):
    """Of a model without files."""

    def check_unchanged(self):
        pass


def identity(weights="d" * 64):
    """The identity of a model whose weights have been read."""
    pending = Future()
    pending.set_result(weights)
    return Identity(
        directory=Path("/models/a"),
        name="a/b",
        revision="abc",
        dtype="bfloat16",
        config="c" * 64,
        tokenizer="e" * 64,
        chat_template="f" * 64,
        files="a" * 64,
        pending_weights=pending,
    )


IDENTITY = identity()
PARAMS = SamplingParams(max_tokens=8, stop=["x"], logit_bias={3: 1.0, 1: -2.0})


def made(*, params=PARAMS, engine=None, **changes):
    """The manifest of a job, with changes."""
    return dataclasses.replace(Manifest.of(IDENTITY, params, engine or EngineConfig()), **changes)
