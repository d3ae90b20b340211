"""Requests that are answered at once: whoever waits gets an answer, or why there is none."""

import pytest

from raymoe.errors import CheckpointError
from raymoe.openai.direct import DirectRequests
from raymoe.openai.store import ApiError


@pytest.mark.parametrize("way", ["load", "stop"])
def test_a_request_that_was_cancelled_keeps_no_other_from_its_refusal(way):
    """As by a client that leaves while the model loads."""
    futures = []

    def fail_to_load():
        futures[0].cancel()
        raise CheckpointError("the weights are damaged")

    direct = DirectRequests(fail_to_load)
    futures += [direct.submit(None) for _ in range(3)]
    if way == "load":
        direct.run(is_stopping=lambda: False, has_batch=lambda: False)
    else:
        futures[0].cancel()
        direct.stop()
    for future in futures[1:]:
        with pytest.raises((CheckpointError, ApiError)):
            future.result(timeout=0)
    assert not direct.is_waiting
