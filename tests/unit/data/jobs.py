"""Manifests of jobs for tests."""

import dataclasses
from pathlib import Path

from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.manifest import Manifest
from raymoe.engine.identity import ModelIdentity

IDENTITY = ModelIdentity(
    directory=Path("/models/a"),
    name="a/b",
    revision="abc",
    dtype="bfloat16",
    config="c" * 64,
    weights="d" * 64,
    tokenizer="e" * 64,
    chat_template="f" * 64,
)
PARAMS = SamplingParams(max_tokens=8, stop=["x"], logit_bias={3: 1.0, 1: -2.0})


def made(*, params=PARAMS, engine=None, **changes):
    """The manifest of a job, with changes."""
    return dataclasses.replace(Manifest.of(IDENTITY, params, engine or EngineConfig()), **changes)
