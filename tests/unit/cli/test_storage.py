"""Files here and on object stores: whole or not there, and errors that say what to do."""

import pickle

import pyarrow as pa
import pytest

from raymoe.cli.storage import Location, upload
from raymoe.download.uris import help_for, is_refusal, reason_of
from raymoe.errors import ConfigError, ExecutionError
from tests.unit.cli.places import PLACES, remote

REGION = "region=us-east-1"  # given, so that nobody asks the network for it


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    """A directory with nothing in it."""
    directory = PLACES[request.param](tmp_path, "dir")
    directory.make_dir()
    return directory


def put(location, content=b"x"):
    with location.replacing() as file:
        file.write(content)
    return location


@pytest.mark.parametrize(
    ("text", "shown", "path"),
    [
        (f"s3://bucket/a/b/?{REGION}", "s3://bucket/a/b", "bucket/a/b"),
        (
            f"s3://bucket/my file.jsonl?{REGION}",
            "s3://bucket/my file.jsonl",
            "bucket/my file.jsonl",
        ),
        (
            f"s3://bucket/a%20b/*.parquet?{REGION}",
            "s3://bucket/a b/*.parquet",
            "bucket/a b/*.parquet",
        ),
        (f"s3://key:secret@bucket/a?{REGION}", "s3://bucket/a", "bucket/a"),
        ("gs://bucket/a", "gs://bucket/a", "bucket/a"),
        ("file:///data/a%20b", "/data/a b", "/data/a b"),
        ("/data/a%20b", "/data/a%20b", "/data/a%20b"),
    ],
)
def test_paths_and_uris_name_files(text, shown, path):
    location = Location.parse(text)
    assert (str(location), location.path) == (shown, path)
    assert location.is_local == shown.startswith("/")
    again = pickle.loads(pickle.dumps(location))
    assert (str(again), again.filesystem) == (str(location), location.filesystem)


def test_relative_paths_are_those_of_the_driver(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Location.parse("a/b") == Location.local(tmp_path / "a" / "b")


def test_a_bucket_is_no_file(tmp_path):
    assert Location.parse(f"s3://bucket?{REGION}").is_bucket
    assert not Location.parse(f"s3://bucket/a?{REGION}").is_bucket
    assert not remote(tmp_path, "a").is_bucket


def test_an_unknown_kind_of_uri_is_refused_without_its_secrets():
    with pytest.raises(ConfigError, match=r"ftp://host/a cannot be used: .*s3://, gs://") as caught:
        Location.parse("ftp://me:secret@host/a?password=secret")
    assert "secret" not in str(caught.value)


def test_files_below_a_directory_are_found_without_hidden_ones(place):
    for directory in ("deep/er", "_old", ".x"):
        place.child(directory).make_dir()
    for name in ("b.parquet", "deep/er/a.parquet", "_old/c.parquet", ".x/d.parquet", "note.txt"):
        put(place.child(name))
    names = sorted(one.path.removeprefix(f"{place.path}/") for one in place.files())
    assert names == ["b.parquet", "deep/er/a.parquet", "note.txt"]
    assert [one.name for one in place.child("*.parquet").glob()] == ["b.parquet"]
    deep = [one.path for one in place.child("**/*.parquet").glob()]
    assert place.child("deep/er/a.parquet").path in deep
    assert [one.name for one in place.entries()] == [".x", "_old", "b.parquet", "deep", "note.txt"]


def test_a_file_appears_whole_and_replaces_what_was_there(place):
    target = place.child("a")
    put(target, b"old")
    with target.replacing() as file:
        file.write(b"new" * 100)
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new" * 100
    with pytest.raises(RuntimeError):
        break_off(target)
    assert target.read_bytes() == b"new" * 100
    assert [one.name for one in place.entries()] == ["a"]


def break_off(target):
    with target.replacing() as file:
        file.write(b"half")
        raise RuntimeError


def test_what_is_not_there_is_no_directory_of_files(place):
    nothing = place.child("nothing")
    assert not nothing.exists()
    assert nothing.entries() == []
    with pytest.raises(ConfigError, match=r"nothing cannot be deleted: .*; check the path"):
        nothing.delete()


def test_a_place_that_cannot_be_written_is_said_before_anything_depends_on_it(tmp_path):
    good = remote(tmp_path, "a")
    good.at("bucket").make_dir()
    good.check_writable()
    assert good.at("bucket").entries() == []
    with pytest.raises(ConfigError, match=r"absent/a\.write-test cannot be written and del"):
        good.at("absent/a").check_writable()


class Stream:
    """A file of an object store: there as soon as it is closed, with what it has by then."""

    def __init__(self, store, path, budget):
        self.store, self.path, self.data, self.budget = store, path, b"", budget

    def write(self, chunk):
        if self.budget <= 0:
            raise OSError("AWS Error SLOW_DOWN")
        self.budget -= 1
        self.data += chunk

    def close(self):
        self.store.files[self.path] = self.data


class Store:
    """An object store that is busy for a while: each try gets one chunk further."""

    def __init__(self, tries_that_fail):
        self.files, self.tries_that_fail, self.tries = {}, tries_that_fail, 0

    def open_output_stream(self, path):
        self.tries += 1
        return Stream(self, path, 9 if self.tries > self.tries_that_fail else 1)

    def delete_file(self, path):
        del self.files[path]


def test_a_store_that_is_busy_is_asked_again_and_never_keeps_half_a_file():
    store = Store(tries_that_fail=2)
    upload(store, "a", lambda: iter([b"1", b"2"]), explain=str, retry_after_s=(0, 0))
    assert store.files == {"a": b"12"}
    away = Store(tries_that_fail=9)
    with pytest.raises(ExecutionError, match="AWS Error SLOW_DOWN"):
        upload(away, "a", lambda: iter([b"1", b"2"]), explain=str, retry_after_s=(0, 0))
    assert (away.files, away.tries) == ({}, 3)


def test_a_run_that_is_interrupted_while_it_sends_leaves_no_half_file():
    store = Store(tries_that_fail=0)

    def chunks():
        yield b"1"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(store, "a", chunks, explain=str)
    assert store.files == {}


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("AWS Error NO_SUCH_BUCKET during ListObjectsV2: gone (Request ID: 1a)", "make the bucket"),
        ("AWS Error ACCESS_DENIED during PutObject operation: Access Denied", "AWS_ACCESS_KEY_ID"),
        ("google::cloud::Status(UNAVAILABLE: Could not create a OAuth2 access", "gcloud auth"),
        ("AWS Error NETWORK_CONNECTION during HeadObject: curlCode: 6", "check the network"),
        ("AWS Error UNKNOWN (HTTP status 301) during ListObjectsV2", "add ?region="),
        ("[Errno 2] Path does not exist 'a/b'", "check the path"),
        ("The specified bucket does not exist", "make the bucket"),  # of s3fs, as what follows
        ("The specified container does not exist.", "make the bucket"),  # of adlfs
        ("Unable to locate credentials", "AWS_PROFILE"),
        ("The config profile (a) could not be found", "AWS_PROFILE"),
        ("The AWS Access Key Id you provided does not exist in our records.", "AWS_PROFILE"),
        ("The request signature we calculated does not match", "AWS_PROFILE"),
        ("Anonymous caller does not have storage.objects.list access", "gcloud auth"),  # of gcsfs
        ('Could not connect to the endpoint URL: "http://127.0.0.1:9/a"', "AWS_ENDPOINT_URL"),
        ("The authorization header is malformed; the region 'a' is wrong", "AWS_REGION"),
    ],
)
def test_errors_of_stores_come_with_what_helps(words, advice):
    error = OSError(f"{words}\nmore lines")
    assert advice in help_for(error)
    assert "Request ID" not in reason_of(error)
    assert "\n" not in reason_of(error)


def test_a_store_that_is_away_has_not_refused():
    assert is_refusal(OSError("The specified bucket does not exist"))
    assert not is_refusal(OSError("Could not connect to the endpoint URL: 'http://a/b'"))
    assert not is_refusal(OSError("disk on fire"))


def test_an_error_that_nobody_knows_has_no_advice():
    assert help_for(OSError("disk on fire")) == ""
    assert reason_of(pa.ArrowInvalid("x" * 1000)).endswith("...")
