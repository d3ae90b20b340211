"""Equal rows of a job: each occurrence once, whoever asks, and the same one when asked again."""

import threading
from types import SimpleNamespace

import pytest

from raymoe.data import occurrences
from raymoe.data.occurrences import KEY, Call, JobOccurrences, Occurrences, RowNumbers

A, B = b"a" * 16, b"b" * 16


def test_equal_rows_are_counted_whatever_call_they_come_in():
    counter = Occurrences()
    assert counter.claim([A, B, A, A]) == [0, 0, 1, 2]
    assert counter.claim([B, A]) == [1, 3]
    assert counter.claim([]) == []


def test_a_task_that_runs_again_gets_what_it_got():
    counter = Occurrences()
    first = counter.claim([A, A], Call(1, 0))
    assert counter.claim([A], Call(2, 0)) == [2]
    unique = counter.claim([B], Call(2, 1))
    assert counter.claim([A, A], Call(1, 0)) == first == [0, 1]
    assert counter.claim([B], Call(2, 1)) == unique == [0]
    assert counter.claim([A], Call(3, 0)) == [3]
    # What runs again with other rows, behind a random stage, say, is another call.
    assert counter.claim([A, B], Call(1, 0)) == [4, 1]


def test_threads_share_no_occurrence():
    counter, given = Occurrences(), []
    threads = [
        threading.Thread(target=lambda: given.extend(counter.claim([A] * 50))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given) == list(range(400))


def test_stages_of_a_pipeline_count_apart():
    counter = JobOccurrences()
    assert counter.claim(0, [A], Call(0, 0)) == [0]
    assert counter.claim(1, [A], Call(0, 0)) == [0]
    assert counter.claim(1, [A], Call(1, 0)) == [1]


class Shared:
    """A counter as its handle looks, with answers instead of references."""

    def __init__(self, error=None):
        self.counter, self.error = JobOccurrences(), error
        self.claim = SimpleNamespace(remote=lambda *args: (self, args))


class GoneError(Exception):
    pass


@pytest.fixture
def ray_data(monkeypatch):
    """Set the task that this thread runs."""

    def get(reference):
        shared, args = reference
        if shared.error is not None:
            raise shared.error
        return shared.counter.claim(*args)

    ray = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayActorError=GoneError))
    monkeypatch.setitem(occurrences.sys.modules, "ray", ray)
    here = SimpleNamespace(task=None)
    monkeypatch.setattr(occurrences, "current_task", lambda: here.task)

    def run(task_idx, **kwargs):
        here.task = SimpleNamespace(task_idx=task_idx, kwargs=kwargs)

    return run


def test_actors_ask_the_counter_of_their_pipeline(ray_data):
    shared, first, second = Shared(), RowNumbers(), RowNumbers()
    ray_data(1, **{KEY: (shared, 0)})
    assert first.claim([A, A]) == [0, 1]
    assert first.claim([A]) == [2]  # the second batch of the task
    ray_data(2, **{KEY: (shared, 0)})
    assert second.claim([A]) == [3]
    ray_data(1, **{KEY: (shared, 0)})  # again, in an actor that was started in its place
    again = RowNumbers()
    assert again.claim([A, A]) == [0, 1]
    assert again.claim([A]) == [2]


def test_a_counter_that_is_gone_is_said_once_and_the_actor_counts_its_own(ray_data, caplog):
    numbers = RowNumbers()
    ray_data(1, **{KEY: (Shared(GoneError("its node died")), 0)})
    assert numbers.claim([A, A]) == [0, 1]
    ray_data(2, **{KEY: (Shared(GoneError("its node died")), 0)})
    assert numbers.claim([A]) == [2]
    assert [record.message for record in caplog.records if "give them ids" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1


def test_without_a_counter_each_object_counts_for_itself(ray_data):
    numbers = RowNumbers()
    assert numbers.claim([A, A]) == [0, 1]
    assert numbers.claim([A]) == [2]
    ray_data(7)
    assert numbers.claim([A]) == [3]
