"""The operator with a journal: what is finished is generated once, whoever finished it."""

import dataclasses
import subprocess
import sys
import threading
from concurrent.futures import Future

import pyarrow as pa
import pytest

from raymoe.config import SamplingParams
from raymoe.data import generator as generators
from raymoe.data.generator import MoEGenerator
from raymoe.data.job_rows import FinishedRows, is_final
from raymoe.data.journal import RowJournal
from raymoe.data.quarantine import in_flight_files
from raymoe.data.rows import RowReader
from raymoe.engine.engine import Engine
from raymoe.engine.outputs import Generation
from raymoe.engine.tokenizer import Chat
from raymoe.errors import ConfigError, ExecutionError
from tests.unit.data.deaths import die
from tests.unit.data.jobs import IDENTITY, identity, made
from tests.unit.data.journals import ENVIRONMENT, ROOT, keys_of_samples
from tests.unit.engine.fakes import FakeRunner, fake_parts, small_policy
from tests.unit.engine.kills import signal_forked

SAMPLED = {"max_tokens": 6, "temperature": 1.0}


class Fakes:
    """Makes operators around the checksum model."""

    def __init__(self, directory, monkeypatch):
        self.directory = directory
        self.before_step = lambda _inputs: None
        self.identity = IDENTITY
        self.made = []
        monkeypatch.setattr(generators, "_load_engine", self._load)
        monkeypatch.setattr(
            generators, "_identify", lambda _source, config: (self.identity, config)
        )

    def _load(self, _source, config):
        runner = FakeRunner(64, self._before_step)
        parts = fake_parts(runner, small_policy(), directory=self.directory)
        return Engine(parts, dataclasses.replace(config, linger_s=0.0))

    def _before_step(self, inputs):
        self.before_step(inputs)  # which a test may set after the engine was made

    def make(self, journal_dir, **options):
        options = {"sampling_params": SAMPLED, **options}
        self.made.append(MoEGenerator("model", journal_dir=journal_dir, **options))
        return self.made[-1]


@pytest.fixture
def fakes(tokenizer_directory, monkeypatch):
    fakes = Fakes(tokenizer_directory, monkeypatch)
    yield fakes
    for operator in fakes.made:
        operator.close()


def num_generated(operator):
    return operator._engine.stats().num_finished_rows


TABLE = pa.table({"id": ["a", "b", "c"], "prompt": ["one", "two", "three"]})


def test_a_later_process_returns_finished_rows_without_generating_them(fakes, tmp_path):
    params = {**SAMPLED, "n": 2, "logprobs": 2, "prompt_logprobs": 1}
    first = fakes.make(tmp_path, id_column="id", sampling_params=params)
    table = first(TABLE)
    first.close()
    second = fakes.make(tmp_path, id_column="id", sampling_params=params)
    assert second(TABLE) == table
    assert num_generated(second) == 0


def test_only_the_rows_that_are_missing_are_generated_and_each_is_in_its_place(fakes, tmp_path):
    undisturbed = fakes.make(None, id_column="id")(TABLE)
    first = fakes.make(tmp_path, id_column="id")
    first(TABLE.slice(1, 1))
    first.close()
    second = fakes.make(tmp_path, id_column="id")
    assert second(TABLE) == undisturbed
    assert num_generated(second) == 2
    assert second(TABLE) == undisturbed  # the process that wrote them finds them as well
    assert num_generated(second) == 2


def test_a_row_is_on_disk_before_the_others_of_its_batch_are_finished(fakes, tmp_path):
    counts = []

    def look(_inputs):
        operator._job.flush()
        journal = RowJournal(tmp_path)
        journal.close()
        counts.append(journal.contents.num_rows)

    operator = fakes.make(tmp_path)
    fakes.before_step = look
    table = pa.table({"prompt": ["a", "b"], "sampling_params": [{"max_tokens": n} for n in (1, 9)]})
    operator(table)
    assert counts[0] == 0
    assert 1 in counts
    assert 2 not in counts


def test_all_rows_of_a_batch_are_on_disk_when_its_call_returns(fakes, tmp_path):
    operator = fakes.make(tmp_path)
    for begin in range(0, 60, 3):
        operator(pa.table({"prompt": [f"row {begin + index}" for index in range(3)]}))
        journal = RowJournal(tmp_path)  # as another process would
        journal.close()
        assert journal.contents.num_rows == begin + 3


def test_rows_without_an_id_are_known_by_what_they_ask_for(fakes, tmp_path):
    first = fakes.make(tmp_path)
    first(pa.table({"prompt": ["same", "other"]}))
    first.close()
    second = fakes.make(tmp_path)
    out = second(pa.table({"prompt": ["new", "same", "same"]})).column("generated_tokens")
    assert num_generated(second) == 2  # one of the equal rows was there
    assert len(set(map(tuple, out.to_pylist()))) == 3


def test_a_row_with_another_id_prompt_or_parameter_is_another_row(fakes, tmp_path):
    first = fakes.make(tmp_path, id_column="id")
    first(TABLE)
    first.close()
    params = pa.array([None, None, {"seed": 5}], pa.struct([("seed", pa.int64())]))
    table = pa.table({"id": ["x", "b", "c"], "prompt": ["one", "TWO", "three"]})
    second = fakes.make(tmp_path, id_column="id")
    second(table.append_column("sampling_params", params))
    assert num_generated(second) == 3


def test_the_kind_of_a_prompt_is_part_of_the_row(fakes, tmp_path):
    first = fakes.make(tmp_path)
    first(pa.table({"prompt": ["[1, 2]"]}))
    first.close()
    second = fakes.make(tmp_path)
    second(pa.table({"prompt": [[1, 2]]}))
    second(pa.table({"messages": [[{"role": "user", "content": "[1, 2]"}]]}))
    assert num_generated(second) == 2


def test_final_errors_are_kept_and_name_their_column(fakes, tmp_path):
    table = pa.table({"prompt": ["x" * 600, None, "fine"]})
    first = fakes.make(tmp_path)
    out = first(table)
    first.close()
    second = fakes.make(tmp_path)
    assert second(table) == out
    assert num_generated(second) == 0
    assert "column 'prompt': the prompt has 601 tokens" in out["__inference_error__"][0].as_py()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("", True),
        ("ConfigError: the prompt has 601 tokens", True),
        ("UnknownOptionError: unknown", True),
        ("DecodeError: token 3", True),
        ("ExecutionError: the engine failed", False),
        ("MemoryError: ", False),
        ("OSError: ConfigError: nested", False),
        ("WorkerProcessError: structured_outputs: was ended", False),
        ("CapacityError: structured_outputs has a regex that takes long", False),
    ],
)
def test_errors_that_may_go_away_are_not_final(error, expected):
    assert is_final(Generation(error=error)) == expected


@pytest.mark.slow
def test_rows_whose_worker_processes_were_killed_are_generated_by_the_next(
    fakes, tmp_path, monkeypatch
):
    params = {"max_tokens": 6, "structured_outputs": {"choice": ["abc"]}}
    table = pa.table({"prompt": ["one", "two"]})
    with monkeypatch.context() as patched:
        signal_forked(patched)
        first = fakes.make(tmp_path, sampling_params=params)
        errors = first(table)["__inference_error__"].to_pylist()
        first.close()
    assert [error.split(":")[0] for error in errors] == ["WorkerProcessError"] * 2
    second = fakes.make(tmp_path, sampling_params=params)
    assert second(table)["generated_text"].to_pylist() == ["abc"] * 2
    assert num_generated(second) == 2


def test_rows_of_a_broken_engine_are_generated_by_the_next(fakes, tmp_path):
    def fail(_inputs):
        steps.append(1)
        if len(steps) == 3:
            raise RuntimeError("the card fell off the bus")

    steps = []
    params = [{"max_tokens": n} for n in (1, 9)]
    table = pa.table({"prompt": ["a", "b"], "sampling_params": params})
    first = fakes.make(tmp_path)
    fakes.before_step = fail
    with pytest.raises(ExecutionError, match="the card fell off the bus"):
        first(table)
    first.close()
    second = fakes.make(tmp_path)
    out = second(table)
    assert out.column("__inference_error__").to_pylist() == ["", ""]
    assert out.column("num_generated_tokens").to_pylist() == [1, 9]
    assert num_generated(second) == 1  # the short one was finished before


def test_rows_of_the_journal_are_no_sign_that_the_engine_works(fakes, tmp_path, monkeypatch):
    fakes.make(tmp_path, id_column="id")(TABLE)
    operator = fakes.make(tmp_path, id_column="id")
    operator(TABLE)
    assert not operator._has_generated_a_batch


def test_a_restart_is_useful_if_the_engine_has_worked_or_deaths_are_counted(
    fakes, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr(generators, "should_leave_process", lambda **how: asked.append(how))
    worked, fresh, counting = fakes.make(None), fakes.make(None), fakes.make(tmp_path)
    worked(TABLE)
    for operator in (worked, fresh, counting):
        operator._engine.close()
        with pytest.raises(ExecutionError, match="the engine is broken"):
            operator(TABLE)
    assert [how["is_restart_useful"] for how in asked] == [True, False, True]


def test_a_guilty_row_becomes_an_error_row_among_good_ones(fakes, tmp_path):
    first = fakes.make(tmp_path, id_column="id")
    requests = first._reader.read(TABLE)
    key = first._job._finished.keys(requests)[1]
    first.close()
    die(tmp_path, [key], alone=True)
    die(tmp_path, [key], alone=True)
    operator = fakes.make(tmp_path, id_column="id")
    out = operator(TABLE)
    good, error, also_good = out.column("__inference_error__").to_pylist()
    assert (good, also_good) == ("", "")
    assert error.startswith("ExecutionError: column 'prompt': this row crashed the process 2 times")
    assert out.column("finish_reason").to_pylist()[1] == "error"
    assert num_generated(operator) == 2


def test_equal_rows_that_end_processes_are_one_guilty_row(fakes, tmp_path):
    first = fakes.make(tmp_path)
    table = pa.table({"prompt": ["same"] * 5 + ["other"]})
    key = first._job._finished.row(first._reader.read(table)[0])
    first.close()
    die(tmp_path, [key], alone=True)
    die(tmp_path, [key], alone=True)
    *errors, good = fakes.make(tmp_path)(table).column("__inference_error__").to_pylist()
    assert good == ""
    assert all("this row crashed the process 2 times" in error for error in errors)


def test_another_model_or_other_options_are_refused_before_the_model_loads(fakes, tmp_path):
    fakes.make(tmp_path).close()
    with pytest.raises(ConfigError, match=r"seed was 0, is 1"):
        fakes.make(tmp_path, seed=1)
    with pytest.raises(ConfigError, match=r"sampling_params.temperature was 1.0, is 0.0"):
        fakes.make(tmp_path, sampling_params={"max_tokens": 6, "temperature": 0.0})
    fakes.identity = identity("0" * 64)
    with pytest.raises(ConfigError, match=r"weights was 'ddd"):
        fakes.make(tmp_path)
    assert len(fakes.made) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_journal_that_is_refused_after_loading_leaves_no_engine(fakes, tmp_path):
    """Weights that had to be read while they were loaded turn out to be another model's."""
    fakes.make(tmp_path).close()
    fakes.identity = pending = dataclasses.replace(IDENTITY, pending_weights=Future())
    threading.Timer(0.3, lambda: pending.pending_weights.set_result("0" * 64)).start()
    before = {*threading.enumerate()}
    with pytest.raises(ConfigError, match=r"weights was 'ddd"):
        fakes.make(tmp_path)
    assert not {*threading.enumerate()} - before


KEYS = """
import sys
sys.path.append(sys.argv[1])
from tests.unit.data.jobs import IDENTITY, made
from tests.unit.data.journals import keys_of_samples
print(" ".join(keys_of_samples()))
"""


def test_keys_are_the_same_in_every_process_and_differ_between_rows():
    keys = keys_of_samples()
    assert len(set(keys)) == 3
    environment = {**ENVIRONMENT, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", KEYS, ROOT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == keys


def test_keys_depend_on_the_job():
    other = FinishedRows(None, made(seed=1))
    (request,) = RowReader(defaults=SamplingParams()).read(pa.table({"prompt": ["a"]}))
    assert other.keys([request]) != FinishedRows(None, made()).keys([request])


def test_keys_depend_on_the_arguments_of_the_template():
    rows, messages = FinishedRows(None, made()), [{"role": "user", "content": "a"}]
    (request,) = RowReader(defaults=SamplingParams()).read(pa.table({"prompt": ["a"]}))
    chats = [Chat(messages, (), kwargs) for kwargs in ({}, {"a": 1}, {"a": 2})]
    keys = rows.keys([dataclasses.replace(request, prompt=chat) for chat in chats])
    assert len(set(keys)) == 3


def test_whoever_waits_for_a_row_hears_of_it_after_the_journal_and_so_does_the_quarantine(tmp_path):
    """A process that ends in between must leave the answer, or the row as one in flight."""
    rows = FinishedRows.open(tmp_path, made(), sync_every_s=1.0)
    (key,) = rows.keys(RowReader(defaults=SamplingParams()).read(pa.table({"prompt": ["a"]})))
    future, happened = Future(), []

    def leave(*, is_finished):
        happened.append(("left", is_finished, recorded.done()))

    recorded = rows.watch(key, future, leave)
    append = rows._journal.append
    rows._journal.append = lambda *row: (happened.append(("kept", recorded.done())), append(*row))
    future.set_result(Generation(text="b"))
    assert happened == [("kept", False), ("left", True, False)]
    assert recorded.result(0) == Generation(text="b")
    rows.flush()
    assert rows.look_up([key]) == [Generation(text="b")]
    rows.close()


def test_a_row_whose_future_fails_is_not_recorded_and_its_waiter_hears_why(tmp_path):
    rows = FinishedRows.open(tmp_path, made(), sync_every_s=1.0)
    (key,) = rows.keys(RowReader(defaults=SamplingParams()).read(pa.table({"prompt": ["a"]})))
    future = Future()
    recorded = rows.watch(key, future)
    future.set_exception(ExecutionError("broken"))
    with pytest.raises(ExecutionError, match="broken"):
        recorded.result(0)
    rows.flush()
    assert rows.look_up([key]) == [None]
    rows.close()


def test_no_row_is_inside_while_the_engine_loads(fakes, tmp_path, monkeypatch):
    seen = []

    def load(source, config):
        seen.append(in_flight_files(tmp_path))
        return fakes._load(source, config)

    monkeypatch.setattr(generators, "_load_engine", load)
    fakes.make(tmp_path)(TABLE)
    assert seen == [[]]
    assert len(in_flight_files(tmp_path)) == 1


def tokens_of(table):
    return [tuple(tokens) for tokens in table.column("generated_tokens").to_pylist()]


def test_equal_rows_get_an_answer_each_and_a_later_run_finds_all_of_them(fakes, tmp_path):
    table = pa.table({"prompt": ["same"] * 8 + ["other"]})
    answers = tokens_of(fakes.make(tmp_path)(table))
    assert len(set(answers)) == 9
    # The first of equal rows, and a prompt that occurs once, get what they would alone.
    alone = fakes.make(None)(pa.table({"prompt": ["other", "same"]}))
    assert tokens_of(alone) == [answers[8], answers[0]]
    later = fakes.make(tmp_path)
    batches = [table.slice(6), table.slice(0, 1), table.slice(1, 5)]
    assert sorted(row for batch in batches for row in tokens_of(later(batch))) == sorted(answers)
    assert num_generated(later) == 0


def test_a_run_that_was_cut_off_generates_only_the_equal_rows_that_are_missing(fakes, tmp_path):
    table = pa.table({"prompt": ["same"] * 8})
    whole = tokens_of(fakes.make(None)(table))
    cut_off = tokens_of(fakes.make(tmp_path)(table.slice(0, 3)))
    later = fakes.make(tmp_path)
    assert sorted(tokens_of(later(table))) == sorted(whole)
    assert num_generated(later) == 5
    assert set(cut_off) < set(whole)
    # One more of them is a new sample, not one of the eight.
    assert set(tokens_of(later(table.slice(0, 1)))).isdisjoint(whole)


def test_equal_rows_that_are_greedy_or_have_an_id_share_an_answer(fakes, tmp_path):
    table = pa.table({"prompt": ["same"] * 4, "id": ["a", "a", "b", None]})
    with_ids = tokens_of(fakes.make(None, id_column="id")(table))
    assert with_ids[0] == with_ids[1]
    assert len(set(with_ids)) == 3
    greedy = fakes.make(tmp_path, sampling_params={"max_tokens": 6, "temperature": 0.0})
    assert len(set(tokens_of(greedy(table)))) == 1
    greedy(table)
    assert num_generated(greedy) == 4
