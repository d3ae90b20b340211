"""What the driver does for journals: one pipeline at a time has one in a bucket."""

from types import SimpleNamespace

import pytest

from raymoe.data import journal_use
from raymoe.data.bucket_lease import BucketLease
from raymoe.data.generator import MoEGenerator
from raymoe.data.journal_place import BucketPlace
from raymoe.data.journal_use import UseJournals
from raymoe.errors import ConfigError, ExecutionError
from tests.unit.data.buckets import make_bucket


class Own(MoEGenerator):
    def __init__(self, *args, own, **kwargs):
        super().__init__(*args, **kwargs)


def pipeline(*stages, fn=MoEGenerator):
    """The executor of Ray Data for stages with these options."""
    logical = [
        SimpleNamespace(fn=fn, fn_constructor_args=("m",), fn_constructor_kwargs=options)
        for options in stages
    ]
    other = SimpleNamespace(fn=len)
    return SimpleNamespace(_topology=[SimpleNamespace(_logical_operators=[other, *logical])])


@pytest.fixture
def buckets(monkeypatch):
    made = {}
    parse = SimpleNamespace(parse=lambda uri, _option: made.setdefault(uri, make_bucket()))
    monkeypatch.setattr(journal_use, "Bucket", parse)
    return made


JOB = {"journal_dir": "s3://jobs/a", "id_column": "id"}


def test_a_second_pipeline_is_refused_until_the_first_has_ended(buckets):
    first, second = UseJournals(), UseJournals()
    first.before_execution_starts(pipeline(JOB, JOB, {}))
    first.on_execution_step(None)
    assert BucketLease(buckets["s3://jobs/a"]).is_held()
    with pytest.raises(ConfigError, match="uses it; wait for its end"):
        second.before_execution_starts(pipeline({"journal_dir": "s3://jobs/b"}, JOB))
    first.after_execution_fails(None, ValueError())
    second.before_execution_starts(pipeline({"journal_dir": "s3://jobs/b"}, JOB))
    second.after_execution_succeeds(None)
    assert [len(bucket.sizes()) for bucket in buckets.values()] == [2, 2]


def test_a_subclass_with_arguments_of_its_own_has_the_lease_too(buckets):
    use = UseJournals()
    use.before_execution_starts(pipeline({**JOB, "own": 1}, fn=Own))
    assert BucketLease(buckets["s3://jobs/a"]).is_held()
    use.after_execution_succeeds(None)


def test_an_actor_says_when_no_driver_has_the_lease(caplog):
    """Of a pipeline that knows nothing of raymoe, such as a bare `map_batches`."""
    bucket = make_bucket()
    BucketPlace(bucket).open(sync_every_s=5).close()
    assert "no driver has the lease" in caplog.text
    caplog.clear()
    lease = BucketLease(bucket)
    lease.take()
    BucketPlace(bucket).open(sync_every_s=5).close()
    lease.release()
    assert not caplog.records
    assert not lease.is_held()


def test_a_pipeline_ends_when_another_has_its_journal(buckets):
    use = UseJournals()
    use.before_execution_starts(pipeline(JOB))
    (lease,) = use._leases.values()
    lease._is_lost = True
    with pytest.raises(ExecutionError, match="another run's by now"):
        use.on_execution_step(None)
    use.after_execution_fails(None, ExecutionError())


def test_how_rows_without_ids_are_known_is_said_in_one_line(buckets, caplog, tmp_path):
    use = UseJournals()
    with caplog.at_level("INFO", "ray.data.raymoe"):
        use.before_execution_starts(pipeline({}, {**JOB, "journal_dir": tmp_path}))
        assert caplog.records == []
        use.before_execution_starts(pipeline({"journal_dir": tmp_path}))
    (record,) = caplog.records
    assert "a row is known by what its answer depends on" in record.message
