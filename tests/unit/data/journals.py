"""What tests of the journal share: rows, keys, and how to start a process of their own."""

import errno
import hashlib
import os
from pathlib import Path

import pyarrow as pa

import raymoe
from raymoe.config import SamplingParams
from raymoe.data import journal, quarantine
from raymoe.data.job_rows import FinishedRows
from raymoe.data.rows import RowReader
from raymoe.engine.outputs import Generation, TokenLogprob

ROOT = str(Path(__file__).parents[3])
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(raymoe.__file__).parents[1])}

FULL = Generation(
    text='two lines\n"quoted" \u00e9 \U0001f600 \0',
    token_ids=(1, 2, 250_000),
    finish_reason="length",
    num_input_tokens=7,
    num_generated_tokens=3,
    num_cached_tokens=2,
    logprobs=(
        TokenLogprob(1, -0.1234567890123456),
        TokenLogprob(2, -1e-30, ((2, -1e-30), (9, float("-inf")))),
    ),
    prompt_logprobs=(None, TokenLogprob(4, -3.0)),
    others=(Generation(text="other", token_ids=(5,), logprobs=()), Generation()),
)


def key_of(number):
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def row(number, text="row"):
    return Generation(text=f"{text} {number}", token_ids=(number, number + 1))


class _Job:
    digest = "of a job"


def keys_of_samples():
    """Keys of three rows of all kinds."""
    reader = RowReader(defaults=SamplingParams(), id_column="id")
    table = pa.table(
        {
            "id": [1, 2, 3],
            "prompt": ["text", "\u00e9", None],
            "messages": [None, None, '[{"role": "user", "content": "hi"}]'],
            "sampling_params": [
                '{"logit_bias": {"3": 1, "1": 2}, "stop": ["a", "b"]}',
                '{"structured_outputs": {"choice": ["x", "y"]}}',
                "{}",
            ],
        }
    )
    rows = FinishedRows(None, _Job())
    return [key.hex() for key in rows.keys(reader.read(table))]


class ReadOnlyOs:
    """The module os on a file system that may only be read: closing a file says so too."""

    def __getattr__(self, name):
        return getattr(os, name)

    def close(self, file):
        os.close(file)
        refuse()

    def open(self, path, flags, *mode):
        return refuse() if flags & os.O_CREAT else os.open(path, flags, *mode)

    def write(self, *_):
        refuse()

    fsync = write


def refuse(*_, **__):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def turn_read_only(monkeypatch):
    for module in (journal, quarantine):
        monkeypatch.setattr(module, "os", ReadOnlyOs())
    monkeypatch.setattr(Path, "unlink", refuse)
