"""The number of threads, for torch and for the native kernels."""

import threading

import pytest
import torch

from raymoe import _native
from raymoe.device.threads import set_num_threads


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    set_num_threads(before)


@pytest.mark.parametrize("count", [1, 3])
def test_both_libraries_use_the_given_number_also_in_another_thread(count, restore_threads):
    seen = []

    def run() -> None:
        set_num_threads(count)
        seen.append((torch.get_num_threads(), _native.num_threads()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(count, count)]
