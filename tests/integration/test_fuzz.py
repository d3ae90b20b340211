"""Random rows of many types, hostile ones among them: each is answered, none harms another."""

import json
import logging
import random
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from raymoe.data.generator import MoEGenerator
from tests.hostile_rows import random_rows
from tests.tiny import make_checkpoint

PARAMS = {"max_tokens": 6, "temperature": 0.0, "logprobs": 1}
MEMORY = {"host_memory_bytes": 3 * 2**30, "dtype": "float32"}
DEVICES = {"cpu": MEMORY, "emulated": {**MEMORY, "device": "emulated"}}
ROWS, THREADS, ROWS_PER_CALL = 250, 8, 12
HOSTILE_SHARE = 0.03
SLOW_S = 30 * 60.0

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def kind_of(value: object) -> str:
    """What a column must have in common to be an Arrow array."""
    if isinstance(value, list):
        return f"list of {kind_of(value[0]) if value else 'nothing'}"
    return type(value).__name__


def tables_of(rows, rng: random.Random) -> list[pa.Table]:
    """Tables of a few rows each; a column has one type, as in Ray Data."""
    groups = defaultdict(list)
    for row_id, (_, row) in enumerate(rows):
        cells = {"id": row_id, **row}
        for name in ("sampling_params", "messages", "tools"):
            if name in cells and not isinstance(cells[name], str | None):
                cells[name] = json.dumps(cells[name], default=repr)
        groups[kind_of(cells.get("prompt"))].append(cells)
    tables = []
    for cells in groups.values():
        for begin in range(0, len(cells), ROWS_PER_CALL):
            tables += as_tables(cells[begin : begin + ROWS_PER_CALL])
    rng.shuffle(tables)
    return tables


def as_tables(rows) -> list[pa.Table]:
    """One table, or one for each row that Arrow can hold, where it refuses them together."""
    names = ("id", "prompt", "messages", "sampling_params", "tools")
    try:
        return [pa.table({name: [row.get(name) for row in rows] for name in names})]
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
        return [] if len(rows) == 1 else [one for row in rows for one in as_tables([row])]


def answers_of(model: Path, tables, config, journal: Path | None) -> dict[int, dict]:
    """Answers by id; every row has exactly one."""
    generator = MoEGenerator(
        model,
        sampling_params=PARAMS,
        engine_config=config,
        id_column="id",
        tools_column="tools",
        has_choices=True,
        journal_dir=journal,
    )
    answers: dict[int, dict] = {}
    work = iter(list(tables))
    lock = threading.Lock()
    failures = []

    def call() -> None:
        while True:
            with lock:
                table = next(work, None)
            if table is None:
                return
            try:
                out = generator(table)
            except BaseException as error:
                failures.append(error)
                return
            assert out.column("id").to_pylist() == table.column("id").to_pylist()
            with lock:
                answers.update((row["id"], row) for row in out.to_pylist())

    threads = [threading.Thread(target=call) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    generator.close()
    assert not failures, failures
    return answers


def what_is_left() -> tuple[set[int], set[Path], set[str]]:
    """Child processes, shared memory and threads of this process."""
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    threads = {thread.name for thread in threading.enumerate() if "raymoe" in thread.name}
    return children, set(Path("/dev/shm").glob("raymoe-*")), threads


def assert_same(one: dict, other: dict) -> None:
    """Equal answers; log probabilities to the rounding of sums over batches of other sizes."""
    for name in ("generated_text", "generated_tokens", "finish_reason", "__inference_error__"):
        assert one[name] == other[name], (one["id"], name)
    pairs = zip(one["logprobs"] or (), other["logprobs"] or (), strict=True)
    for left, right in pairs:
        assert left["token_id"] == right["token_id"]
        assert left["logprob"] == pytest.approx(right["logprob"], abs=1e-3)


def without(table: pa.Table, is_hostile: dict[int, bool]) -> pa.Table:
    return table.filter(pa.array([not is_hostile[row] for row in table["id"].to_pylist()]))


def check(
    model: Path, device: str, seed: int, directory: Path, hostile_share: float = HOSTILE_SHARE
) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, ROWS, hostile_share)
    tables = tables_of(rows, rng)
    ids = [row_id for table in tables for row_id in table.column("id").to_pylist()]
    is_hostile = {row_id: name is not None for row_id, (name, _) in enumerate(rows)}
    good = [without(table, is_hostile) for table in tables]
    before = what_is_left()
    found = answers_of(model, tables, DEVICES[device], directory / "journal")
    assert sorted(found) == sorted(ids)
    for row_id, answer in found.items():
        assert bool(answer["__inference_error__"]) == is_hostile[row_id], rows[row_id][0]
    for row_id, answer in answers_of(model, good, DEVICES["cpu"], None).items():
        assert answer["__inference_error__"] == ""
        assert_same(found[row_id], answer)
    again = answers_of(model, tables, DEVICES[device], directory / "journal")
    for row_id, answer in again.items():
        assert_same(found[row_id], answer)
    assert what_is_left() == before


@pytest.mark.parametrize(("device", "seed"), [("cpu", 1), ("emulated", 2)])
def test_hostile_rows_end_alone(model, tmp_path, device, seed):
    check(model, device, seed, tmp_path)


def test_every_hostile_row_ends_alone(model, tmp_path):
    """Each of them, several times, among as many good ones."""
    check(model, "cpu", 3, tmp_path, hostile_share=0.5)


@pytest.mark.slow
def test_hostile_rows_end_alone_for_half_an_hour(model, tmp_path):
    first = int(time.time())
    deadline_s = time.monotonic() + SLOW_S
    for number, seed in enumerate(range(first, first + 1_000_000)):
        if time.monotonic() > deadline_s:
            break
        logger.info("seed %d", seed)
        check(model, ("cpu", "emulated")[number % 2], seed, tmp_path / str(seed))
