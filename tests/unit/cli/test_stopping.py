"""The first signal stops in order, the second ends the process."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from raymoe.cli.stopping import Stopped, listen, stops_in_order


def send(number):
    os.kill(os.getpid(), number)
    signal.pause()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_raised_with_its_name(number, code):
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as stop, stops_in_order():
        send(number)
    assert (stop.value.name, stop.value.exit_code) == (number.name, code)
    assert signal.getsignal(number) is before


def test_a_handler_that_was_set_in_between_is_replaced():
    def stop_after_ray() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as `ray.init` sets one
        listen()
        send(signal.SIGTERM)

    with pytest.raises(Stopped), stops_in_order():
        stop_after_ray()


def test_other_threads_get_no_signals():
    def run() -> None:
        with stops_in_order():
            listen()

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before


SCRIPT = """
import os, signal, time
from raymoe.cli.stopping import Stopped, stops_in_order
with stops_in_order():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except Stopped:
        print("stopping", flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
"""


def test_the_second_signal_ends_the_process_at_once():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stdout, done.stderr) == ("stopping\n", "")
    assert done.returncode == -signal.SIGINT
