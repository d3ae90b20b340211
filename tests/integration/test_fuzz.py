"""Random rows of many types, hostile ones among them: each is answered, none harms another."""

import contextlib
import logging
import os
import random
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from raymoe.data.generator import MoEGenerator
from tests.hostile_rows import MAY_ANSWER, SLOW, Row, answers, as_tables, random_rows
from tests.tiny import make_checkpoint

PARAMS = {"max_tokens": 6, "temperature": 0.0, "logprobs": 1}
MEMORY = {"host_memory_bytes": 3 * 2**30, "dtype": "float32"}
DEVICES = {"cpu": MEMORY, "emulated": {**MEMORY, "device": "emulated"}}
NUM_ROWS, NUM_THREADS, ROWS_PER_CALL, MAX_TOKENS = 300, 8, 12, 12
HOSTILE_SHARE, SEEN_TWICE = 0.03, 0.5
SLOW_S = 30 * 60.0

Answers = dict[tuple[bytes, str], list[Row]]

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def answers_of(model: Path, tables: list[pa.Table], config, journal: Path | None) -> Answers:
    """What comes out for each id and kind, by many threads as in Ray Data."""
    generator = MoEGenerator(
        model,
        sampling_params=PARAMS,
        engine_config=config,
        id_column="id",
        has_choices=True,
        journal_dir=journal,
    )
    found: Answers = defaultdict(list)
    failures: list[BaseException] = []
    work, lock = iter(tables), threading.Lock()

    def call() -> None:
        while not failures:
            with lock:
                table = next(work, None)
            if table is None:
                return
            try:
                rows = answers(generator(table))
            except BaseException as error:
                failures.append(error)
                return
            with lock:
                for key, row in rows:
                    found[key].append(row)

    threads = [threading.Thread(target=call) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    generator.close()
    assert not failures, failures
    return found


def what_is_left() -> tuple[set[int], set[Path], set[str]]:
    """Child processes, shared memory and threads of this process."""
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    threads = {thread.name for thread in threading.enumerate() if "raymoe" in thread.name}
    shared = {path for path in Path("/dev/shm").glob("raymoe-*") if not is_of_others(path)}
    return children, shared, threads


def is_of_others(path: Path) -> bool:
    """Whether another process, such as one of another test, has a file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.readlink() == path and link.parts[2] != str(os.getpid()):
                return True
    return False


def assert_same(ones: list[Row], others: list[Row]) -> None:
    """Equal answers; log probabilities to the rounding of sums over batches of other sizes."""
    names = ("generated_text", "generated_tokens", "finish_reason", "__inference_error__")
    for one, other in zip(sorted_rows(ones), sorted_rows(others), strict=True):
        assert [one[name] for name in names] == [other[name] for name in names]
        pairs = zip(one["logprobs"] or (), other["logprobs"] or (), strict=True)
        for left, right in pairs:
            assert left["token_id"] == right["token_id"]
            assert left["logprob"] == pytest.approx(right["logprob"], abs=1e-3)


def sorted_rows(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["generated_tokens"], row["__inference_error__"]))


def check(model: Path, device: str, seed: int, directory: Path, share: float = HOSTILE_SHARE):
    rng = random.Random(seed)
    rows = random_rows(rng, NUM_ROWS, share, without=SLOW, max_tokens=MAX_TOKENS)
    tables = list(as_tables(rows, ROWS_PER_CALL))
    rng.shuffle(tables)
    plain = list(as_tables([row for row in rows if not row["kind"]], ROWS_PER_CALL))
    before = what_is_left()
    found = answers_of(model, tables, DEVICES[device], directory / "journal")
    assert sum(map(len, found.values())) == len(rows)
    for (_, kind), answered in found.items():
        is_wrong = [bool(row["__inference_error__"]) for row in answered]
        assert kind in MAY_ANSWER or all(is_wrong) == any(is_wrong) == bool(kind), kind
    for key, answered in answers_of(model, plain, DEVICES[device], None).items():
        assert_same(found[key], answered)
    for key, answered in answers_of(model, tables, DEVICES[device], directory / "journal").items():
        assert_same(found[key], answered)
    assert what_is_left() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "seed", "share"),
    [("cpu", 1, HOSTILE_SHARE), ("emulated", 2, SEEN_TWICE)],
)
def test_hostile_rows_end_alone(model, tmp_path, device, seed, share):
    check(model, device, seed, tmp_path, share)


@pytest.mark.slow
def test_hostile_rows_end_alone_for_half_an_hour(model, tmp_path):
    first = int(time.time())
    deadline_s = time.monotonic() + SLOW_S
    for number, seed in enumerate(range(first, first + 1_000_000)):
        if time.monotonic() > deadline_s:
            break
        logger.info("seed %d", seed)
        check(model, ("cpu", "emulated")[number % 2], seed, tmp_path / str(seed))
