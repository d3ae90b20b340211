"""Score, classify and embed through `MoEGenerator`: columns, error rows, journal."""

import numpy as np
import pyarrow as pa
import pytest

from raymoe.config import EngineConfig
from raymoe.data.generator import MoEGenerator
from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError
from tests.tiny import make_checkpoint

CONFIG = {"dtype": "float32", "device": "cpu", "num_threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def test_scores_come_as_columns_and_from_the_journal(model, tmp_path):
    table = pa.table(
        {
            "prompt": ["2 + 2 = ", None, "x", "y"],
            "continuation": ["4", "a document", None, "z" * 600],
        }
    )
    options = {
        "task": "score", "engine_config": CONFIG, "journal_dir": tmp_path / "journal",
        "task_options": {"token_logprobs": True},
    }  # fmt: skip
    generator = MoEGenerator(model, **options)
    first = generator(table)
    rows = first.to_pylist()
    assert [bool(row["__inference_error__"]) for row in rows] == [False, False, True, True]
    # A space at the end of the prompt counts to the continuation.
    assert [row["num_scored_tokens"] for row in rows[:2]] == [2, len("a document")]
    for row in rows[:2]:
        assert row["logprob"] == pytest.approx(sum(row["token_logprobs"]), rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(-row["mean_logprob"]))
    steps = generator._engine.stats().num_steps
    assert generator(table).equals(first)
    assert generator._engine.stats().num_steps == steps  # all rows are from the journal
    generator.close()
    with pytest.raises(ConfigError, match="token_logprobs"):
        MoEGenerator(model, **(options | {"task_options": {}}))


def test_labels_of_the_job_and_of_rows_have_probabilities(model):
    table = pa.table({"prompt": ["a", "b" * 70], "labels": [None, ["one", "two", "three"]]})
    generator = MoEGenerator(
        model, task="classify", engine_config=CONFIG, task_options={"labels": ["yes", "no"]}
    )
    rows = generator(table.rename_columns(["prompt", "labels"])).to_pylist()
    generator.close()
    assert [len(row["label_probabilities"]) for row in rows] == [2, 3]
    for row in rows:
        probabilities = {one["label"]: one["probability"] for one in row["label_probabilities"]}
        assert sum(probabilities.values()) == pytest.approx(1.0)
        assert (
            row["label_probability"] == max(probabilities.values()) == probabilities[row["label"]]
        )


def test_embeddings_have_length_one(model):
    generator = MoEGenerator(
        model, task="embed", engine_config=CONFIG, task_options={"pooling": "mean", "dimensions": 9}
    )
    rows = generator(pa.table({"prompt": ["a", "", "abc"]})).to_pylist()
    generator.close()
    assert [bool(row["__inference_error__"]) for row in rows] == [False, True, False]
    assert np.linalg.norm(rows[2]["embedding"]) == pytest.approx(1.0, rel=1e-5)
    assert len(rows[0]["embedding"]) == 9


def test_windows_score_each_token_once(model):
    text = "the quick brown fox jumps over the lazy dog " * 4
    config = EngineConfig(dtype="float32", device="cpu", num_threads=1, max_model_len=50)
    with Engine.from_pretrained(model, config) as engine:
        (short,) = engine.score([None], [text], token_logprobs=True)
        (long,) = engine.score([None], [text], token_logprobs=True, stride=10)
    assert short.values["num_scored_tokens"] == long.values["num_scored_tokens"] == len(text)
    np.testing.assert_allclose(
        short.values["token_logprobs"][:49], long.values["token_logprobs"][:49], atol=1e-5
    )
