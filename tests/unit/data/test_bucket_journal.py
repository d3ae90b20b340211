"""A journal in a bucket: rows outlive their process, whatever the store does."""

import sys
import threading
import tracemalloc

import pytest

from raymoe.data import bucket_journal
from raymoe.data import journal as journals
from raymoe.data.bucket import Bucket, BucketError
from raymoe.data.bucket_journal import (
    HEAD_BYTES,
    BucketJournal,
    forget_errors_in,
    row_objects,
)
from raymoe.data.job_rows import FinishedRows
from raymoe.data.journal import encode_generation
from raymoe.data.journal_place import BucketPlace, place_of
from raymoe.engine.outputs import Generation
from raymoe.errors import ConfigError
from tests.unit.data.buckets import make_bucket
from tests.unit.data.jobs import made
from tests.unit.data.journals import FULL, key_of, row

SELDOM_S = 3600


@pytest.fixture
def bucket():
    return make_bucket()


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch):
    monkeypatch.setattr(bucket_journal, "RETRY_AFTER_S", 0.01)
    monkeypatch.setattr(bucket_journal, "RETRY_LAST_AFTER_S", (0.01,))


def written(bucket, *numbers, sync_every_s=SELDOM_S):
    journal = BucketJournal(bucket, sync_every_s=sync_every_s)
    for number in numbers:
        journal.append(key_of(number), row(number))
    journal.close()
    return journal


def found(bucket, *numbers):
    journal = BucketJournal(bucket)
    try:
        return journal.find([key_of(number) for number in numbers])
    finally:
        journal.close()


def test_rows_are_found_by_the_process_that_put_them_and_by_later_ones(bucket):
    journal = BucketJournal(bucket, sync_every_s=SELDOM_S)
    journal.append(key_of(1), FULL)
    journal.append(key_of(2), row(2))
    journal.save()
    keys = [key_of(number) for number in (2, 3, 1)]
    assert journal.find(keys) == [row(2), None, FULL]
    journal.append(key_of(3), row(3))
    journal.close()
    assert journal.find(keys) == [row(2), row(3), FULL]
    assert found(bucket, 2, 3, 1) == [row(2), row(3), FULL]


def test_what_is_finished_in_some_seconds_is_one_object(bucket):
    journal = BucketJournal(bucket, sync_every_s=SELDOM_S)
    for number in range(100):
        journal.append(key_of(number), row(number))
        journal.flush()  # as each call does: it waits for no store
    assert bucket.filesystem.asked["put"] == 0
    journal.save()
    journal.save()
    journal.close()
    assert len(row_objects(bucket)) == bucket.filesystem.asked["put"] == 1
    assert found(bucket, *range(100)) == [row(number) for number in range(100)]


def test_an_object_is_put_when_its_time_has_come_or_when_it_is_full(bucket, monkeypatch):
    is_put = threading.Event()
    put = bucket.filesystem.pipe_file
    monkeypatch.setattr(
        bucket.filesystem, "pipe_file", lambda *a, **k: (put(*a, **k), is_put.set())
    )
    journal = BucketJournal(bucket, sync_every_s=0.01)
    journal.append(key_of(0), row(0))
    assert is_put.wait(60)
    journal.close()
    monkeypatch.setattr(bucket_journal, "PUT_BYTES", 1000)
    journal = BucketJournal(bucket, sync_every_s=SELDOM_S)
    for number in range(1, 4):
        journal.append(key_of(number), Generation(text="x" * 1000))
        journal.flush()
    assert len(row_objects(bucket)) == 4
    journal.close()
    assert len(row_objects(bucket)) == 4


@pytest.mark.parametrize("kind", ["put", "answer"])
def test_a_put_that_breaks_is_put_again_with_what_came_since(bucket, caplog, kind):
    journal = BucketJournal(bucket, sync_every_s=SELDOM_S)
    bucket.filesystem.failures[kind] = 2
    for number in range(3):
        journal.append(key_of(number), row(number))
        journal.save()
    journal.append(key_of(3), row(3))
    journal.close()
    assert journal.num_lost_rows == 0
    assert caplog.text.count("the store is away") == 1
    assert caplog.text.count("can be written again") == 1
    assert found(bucket, 0, 1, 2, 3) == [row(number) for number in range(4)]
    assert len(row_objects(bucket)) == 1


def test_a_put_that_breaks_is_put_again_by_itself(bucket):
    bucket.filesystem.failures["put"] = 5
    journal = BucketJournal(bucket, sync_every_s=0.0)
    journal.append(key_of(0), row(0))
    while not row_objects(bucket):
        pass
    journal.close()
    assert found(bucket, 0) == [row(0)]


def test_a_store_that_stays_away_loses_rows_says_so_and_ends_no_job(bucket, monkeypatch, caplog):
    monkeypatch.setattr(bucket_journal, "MAX_WAITING_BYTES", 2000)
    bucket.filesystem.failures["put"] = 10**9
    journal = BucketJournal(bucket, sync_every_s=SELDOM_S)
    for number in range(3):
        journal.append(key_of(number), Generation(text="x" * 900))
        journal.save()
    assert journal.num_lost_rows == 1
    journal.close()
    assert journal.num_lost_rows == 3
    assert caplog.text.count("cannot be written") == 2  # by the store, by the journal: one record
    assert len(caplog.records) == 1


def test_objects_that_cannot_be_read_cost_their_rows_and_a_list_that_fails_is_an_error(bucket):
    written(bucket, 0)
    written(bucket, 1)
    bucket.filesystem.failures["read"] = 3  # the first object twice, or both and one again
    journal = BucketJournal(bucket)
    journal.close()
    assert journal.contents.num_damaged_files >= 1
    bucket.filesystem.failures.clear()
    bucket.filesystem.failures["list"] = 1
    with pytest.raises(
        BucketError, match=r"s3://jobs/.* cannot be listed: list: the store is away"
    ):
        BucketJournal(bucket)
    bucket.filesystem.failures["list"] = 1
    with pytest.raises(ConfigError, match="a bucket in which this user may list, read and write"):
        BucketPlace(bucket).open(sync_every_s=1)


HEAD, ENTRY = 16, 16  # bytes


@pytest.mark.parametrize(
    ("begin", "end", "left", "num_damaged"),
    [
        (-1, None, [0], 0),  # in the last record
        (-1, 10**6, [0], 0),  # which is cut
        (0, 1, [], 1),  # in the magic
        (HEAD + ENTRY, HEAD + ENTRY + 1, [], 1),  # in the index
        (HEAD + ENTRY, 10**6, [], 1),
        (8, 9, [], 1),  # in the number of rows
        (10, 11, [], 1),
        (0, 10**6, [], 1),
    ],
)
def test_damage_costs_the_rows_that_it_is_in(bucket, caplog, begin, end, left, num_damaged):
    written(bucket, 0, 1)
    written(bucket, 2)
    name, other = row_objects(bucket)
    if BucketJournal(Only(bucket, name)).contents.num_rows == 1:
        name = other
    data = bytearray(bucket.read(name))
    data[begin:end] = bytes(byte ^ 0xFF for byte in data[begin:end]) if end != 10**6 else b""
    bucket.put(name, bytes(data))
    expected = [row(number) if number in left else None for number in range(2)]
    journal = BucketJournal(bucket)
    assert journal.find([key_of(number) for number in range(3)]) == [*expected, row(2)]
    journal.close()
    assert journal.contents.num_damaged_files == num_damaged
    assert journal.contents.num_ignored_bytes == num_damaged * len(data)
    assert "generated again" in caplog.text
    forget_errors_in(bucket)
    assert found(bucket, 0, 1, 2) == [*expected, row(2)]


def test_opening_reads_indexes_and_rows_are_read_in_blocks(bucket, monkeypatch):
    monkeypatch.setattr(bucket_journal, "BLOCK_BYTES", 4096)
    for begin in (0, 100):
        journal = BucketJournal(Only(bucket), sync_every_s=SELDOM_S)
        for number in range(begin, begin + 100):
            journal.append(key_of(number), Generation(text=f"{number} " + "x" * 1000))
        journal.close()
    bucket.filesystem.num_read_bytes = 0
    journal = BucketJournal(bucket)
    assert journal.contents.num_rows == 200
    assert bucket.filesystem.num_read_bytes == 2 * HEAD_BYTES
    assert bucket.filesystem.asked["read"] == 2
    for number in (150, 151, 152, 150):
        assert journal.find([key_of(number)])[0].text.startswith(f"{number} ")
    assert bucket.filesystem.asked["read"] <= 4
    journal.close()


@pytest.mark.parametrize("num_failures", [0, 1])
def test_rows_that_no_index_has_room_for_are_in_the_next_object(
    bucket, monkeypatch, caplog, num_failures
):
    monkeypatch.setattr(bucket_journal, "MAX_ROWS", 10)
    monkeypatch.setattr(bucket_journal, "MAX_WAITING_BYTES", 10 * HEAD_BYTES)
    bucket.filesystem.failures["put"] = num_failures
    journal = BucketJournal(bucket, sync_every_s=SELDOM_S)
    journal.append(key_of(0), row(0))
    journal.save()
    journal._writer._write([(key_of(number), row(number)) for number in range(1, 35)])
    journal.close()
    assert journal.num_lost_rows == 0
    assert caplog.text.count("can be written again") == num_failures
    assert found(bucket, *range(35)) == [row(number) for number in range(35)]
    assert len(row_objects(bucket)) == 5


def test_an_object_grows_until_it_is_full_and_rows_keep_their_places(bucket, monkeypatch):
    monkeypatch.setattr(bucket_journal, "PUT_BYTES", 1000)
    journal, numbers = BucketJournal(bucket, sync_every_s=SELDOM_S), range(40)
    others = []
    for number in numbers:
        journal.append(key_of(number), row(number))
        journal.save()
        assert journal.find([key_of(number)]) == [row(number)]  # in what is kept of it too
        others.append(BucketJournal(bucket))
    num_bytes = sum(len(encode_generation(row(number))) + 24 for number in numbers)
    assert num_bytes // 1100 <= len(row_objects(bucket)) <= num_bytes // 1000 + 1
    for last, other in enumerate(others):
        expected = [row(number) if number <= last else None for number in numbers]
        assert other.find([key_of(number) for number in numbers]) == expected
        other.close()
    journal.close()
    assert found(bucket, *numbers) == [row(number) for number in numbers]


def test_an_object_is_read_once_however_many_rows_of_it_are_asked_for(bucket):
    written(bucket, *range(200))
    journal = BucketJournal(bucket)
    threads = [
        threading.Thread(target=journal.find, args=([key_of(n) for n in range(begin, begin + 20)],))
        for begin in range(0, 200, 20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert bucket.filesystem.asked["read"] == 2  # its index, and it


def test_memory_holds_places_and_few_objects(bucket, monkeypatch):
    monkeypatch.setattr(bucket_journal, "NUM_BLOCKS", 4)
    monkeypatch.setattr(journals, "MIN_RECENT", 512)
    for begin in range(0, 5000, 100):
        journal = BucketJournal(Only(bucket), sync_every_s=SELDOM_S)
        for number in range(begin, begin + 100):
            journal.append(key_of(number), Generation(text=f"{number} " + "x" * 1000))
        journal.close()
    num_bytes = sum(row_objects(bucket).values())
    tracemalloc.start()
    try:
        journal = BucketJournal(bucket)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    journal.close()
    assert journal.contents.num_rows == 5000
    assert held_bytes < num_bytes / 10
    asked = bucket.filesystem.asked
    for number in (0, 1000, 2000, 3000, 4000, 0):  # objects of their own
        before = asked["read"]
        assert journal.find([key_of(number)])[0].text.startswith(f"{number} ")
        assert asked["read"] > before  # as it is not kept any more


class Only(Bucket):
    """The bucket, as one that has these objects; whoever opens it reads no others."""

    def __init__(self, bucket, *names):
        super().__init__(bucket.filesystem, bucket.path, bucket.uri)
        object.__setattr__(self, "names", names)

    def sizes(self, directory=""):
        return dict.fromkeys(self.names, 0)


def test_rows_with_errors_are_forgotten_and_all_others_found(bucket):
    failed = Generation(finish_reason="error", error="ConfigError: too long")
    journal = BucketJournal(bucket, sync_every_s=SELDOM_S)
    for number in (1, 2, 3):
        journal.append(key_of(number), failed if number == 2 else row(number))
    journal.close()
    assert forget_errors_in(bucket) == 1
    assert found(bucket, 1, 2, 3) == [row(1), None, row(3)]
    assert forget_errors_in(bucket) == 0


def test_a_place_belongs_to_one_job_and_goes_with_it(bucket, monkeypatch):
    monkeypatch.setattr("raymoe.data.job_rows.place_of", lambda _uri: BucketPlace(bucket))
    place = BucketPlace(bucket)
    assert place.read_manifest() is None
    rows = FinishedRows.open(bucket.uri, made(), sync_every_s=SELDOM_S)
    rows.close()
    place.claim(made())
    assert place.read_manifest() == made()
    with pytest.raises(ConfigError, match=r"manifest\.json is of another job.* seed was 0, is 1"):
        place.check(made(seed=1))
    written(bucket, 1)
    assert place.row_bytes() > 50
    place.check_only_ours()
    bucket.put("thesis.doc", b"x")
    with pytest.raises(ConfigError, match=r"thesis\.doc was not written by raymoe"):
        place.check_only_ours()
    place.remove()
    assert list(bucket.sizes()) == ["thesis.doc"]


def test_crashes_are_recorded_on_each_node(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYMOE_CACHE", str(tmp_path))
    first, other = (BucketPlace(one).crash_directory for one in (bucket, make_bucket()))
    assert first.is_dir()
    assert first != other
    (first / "death-1.rows").write_bytes(b"raymoei1")
    BucketPlace(bucket).forget_errors()
    assert list(first.iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("ftp://host/job", "a place in a bucket that begins with s3://, gs:// or abfs://"),
        (
            "s3://bucket",
            r"a whole bucket; name a place in it, such as s3://bucket/answers\.journal",
        ),
        ("s3://bucket/", "a whole bucket"),
        ("s3://bucket/job?region=x", "has options behind a question mark; .* AWS_ENDPOINT_URL"),
    ],
)
def test_places_that_no_journal_can_be_in_are_refused(uri, reason):
    with pytest.raises(ConfigError, match=f"journal_dir .*{reason}"):
        place_of(uri)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    known = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(known, "s3", raising=False)  # of a test before
    with pytest.raises(ConfigError, match=r"pip install 'fsspec\[s3\]'"):
        place_of("s3://bucket/job")
