"""The workload of a job, from a sample of its rows, and the plan that it gives."""

import numpy as np
import pyarrow as pa
import pytest

from raymoe.assets import demo_model_path
from raymoe.config import SamplingParams
from raymoe.data.rows import RowReader
from raymoe.data.tasks import reader_of
from raymoe.data.workload import SAMPLED_ROWS, describe, resized, workload_of
from raymoe.engine.tokenizer import Tokenizer
from raymoe.plan.search import find_plan
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from raymoe.specs.workload import Workload

# The table of the review: nodes and models, mean tokens of prompts and answers.
NODES = [("l4", "mixtral-8x7b"), ("a5000", "mixtral-8x7b"), ("a40", "qwen3-30b-a3b"),
         ("4090", "gpt-oss-120b"), ("l40s", "glm-4.5-air")]  # fmt: skip
LENGTHS = [(77, 256), (418, 128), (2048, 64), (1000, 1000), (300, 4)]
NUM_ROWS = 100_000


def test_lengths_are_those_of_the_tokenizer_and_the_rows_own_limits():
    texts = ["date: 3 May 2021 ->", "a", "", "date: 3 May 2021 -> and a longer one"]
    table = pa.table(
        {
            "prompt": texts,
            "sampling_params": [None, '{"max_tokens": 3, "n": 2}', None, '{"max_tokens": "x"}'],
        }
    )
    reader = RowReader(defaults=SamplingParams(max_tokens=9), has_choices=True)
    found = workload_of(table, 2000, demo_model_path(), reader)
    tokenizer = Tokenizer(demo_model_path(), 10_000)
    first, second = (len(tokenizer.encode(text)) for text in texts[:2])
    tokenizer.close()
    assert found.row_lengths == ((first, 9), (second, 3), (second, 3))
    assert found.num_rows == 3000  # the third and fourth row are errors; the second is two
    assert describe(found).startswith("3,000 rows; prompts of")


def test_token_ids_are_counted_without_a_tokenizer_and_unknown_models_give_none():
    table = pa.table({"prompt": [[1, 2, 3], [4] * 9]})
    reader = RowReader(defaults=SamplingParams(max_tokens=5))
    assert workload_of(table, 7, demo_model_path(), reader).row_lengths == ((3, 5), (9, 5))
    assert workload_of(table, 7, "nobody/has-this", reader) is None
    assert workload_of(table.slice(0, 0), 0, demo_model_path(), reader) is None


def test_prompt_tokens_of_earlier_rows_are_counted():
    head = list(range(70))
    prompts = [[*head, 200 + row, 7] for row in range(4)] + [[*head[:40], 999], [5] * 33, [5] * 33]
    reader = RowReader(defaults=SamplingParams(max_tokens=5, n=2), has_choices=True)
    found = workload_of(pa.table({"prompt": prompts}), 70, demo_model_path(), reader)
    # Three of four share 64 tokens, one 32, the last 32; the other sample of each row all blocks.
    shared = 3 * 64 + 32 + 32 + 4 * 64 + 3 * 32
    assert found.shared_prompt_tokens == round(shared / 14)
    assert found.num_rows == 140
    assert f"of which {found.shared_prompt_tokens} are those of an earlier row" in describe(found)


def test_rows_of_a_task_are_only_read_whatever_they_say_of_sampling():
    table = pa.table({
        "prompt": [[1, 2, 3], [4] * 9, []],
        "continuation": [[5], [6, 7], [8] * 1100],
        "sampling_params": ['{"max_tokens": 300}'] * 3,
    })  # fmt: skip
    reader = reader_of({"task": "score"})
    found = workload_of(table, 30, demo_model_path(), reader)
    assert not found.generates
    assert "generated" not in describe(found)
    longest = ModelSpec.from_directory(demo_model_path()).max_model_len
    windows = [tokens for tokens, _ in found.row_lengths[2:]]
    assert found.row_lengths[:2] == ((4, 1), (11, 1))
    assert {generated for _, generated in found.row_lengths} == {1}
    assert len(windows) == len(range(0, 1100 - 1, longest - 1))  # as the engine cuts documents
    assert sum(windows) == 1100 + len(windows) - 1
    assert found.num_rows == 10 * len(found.row_lengths)


def test_a_workload_that_is_given_is_read_where_nothing_is_generated():
    given = Workload.of_rows(((9, 70), (3, 50)))
    assert given.without_generation().row_lengths == ((9, 1), (3, 1))
    assert given.without_generation().total_generated_tokens == 2
    assert not given.without_generation().generates


def lognormal(generator, mean, size):
    """Lengths of this mean, sigma 0.7."""
    drawn = generator.lognormal(np.log(mean) - 0.7**2 / 2, 0.7, size)
    return np.clip(np.rint(drawn), 1, 4 * mean).astype(int).tolist()


def seconds(node, model, workload, planned_for):
    """How long a job takes by the plan that was made for another workload."""
    hardware, spec = hardware_preset(node), model_preset(model)
    plan = find_plan(spec, hardware, planned_for)
    done = find_plan(spec, hardware, workload, schedule=plan.schedule, policy=plan.policy)
    return done.job.seconds


CELLS = [(node, lengths) for node in NODES for lengths in LENGTHS]


@pytest.mark.slow
@pytest.mark.parametrize(("node", "lengths"), CELLS)
def test_the_plan_of_a_sample_is_that_of_all_lengths(node, lengths):
    generator = np.random.default_rng()
    pairs = tuple(
        zip(*(lognormal(generator, mean, NUM_ROWS // 10) for mean in lengths), strict=True)
    )
    exact = resized(Workload.of_rows(pairs), NUM_ROWS)
    sample = resized(Workload.of_rows(pairs[:SAMPLED_ROWS]), NUM_ROWS)
    of_sample = seconds(*node, exact, sample)
    of_all = seconds(*node, exact, exact)
    assert of_sample / of_all <= 1.05
