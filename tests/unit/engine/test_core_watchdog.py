"""The watchdog: late steps only, once."""

import threading
from types import SimpleNamespace

from raymoe.engine import core as watchdogs
from raymoe.engine.core import Watchdog, longest_step_s, stacks_of_all_threads
from raymoe.plan.policy import Policy
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS


def test_a_step_that_takes_too_long_is_reported_once():
    reports, seen = [], threading.Event()

    def report(waited_s: float) -> None:
        reports.append(waited_s)
        seen.set()

    watchdog = Watchdog(0.05, report)
    watchdog.step_begins()
    assert seen.wait(30)
    watchdog.close()
    assert len(reports) == 1
    assert reports[0] >= 0.05


def test_many_short_steps_and_long_pauses_are_fine():
    reports = []
    watchdog = Watchdog(0.2, reports.append)
    for _ in range(6):
        watchdog.step_begins()
        threading.Event().wait(0.01)
        watchdog.step_ends()
        threading.Event().wait(0.05)
    threading.Event().wait(0.3)
    watchdog.close()
    assert reports == []
    assert not watchdog._thread.is_alive()


def plan_with_steps_of(seconds):
    policy = Policy(
        max_num_seqs=8, max_num_batched_tokens=64, max_prefill_chunk_tokens=32, num_kv_blocks=40
    )
    loads = []

    def predict(load):
        loads.append(load)
        return seconds

    return SimpleNamespace(policy=policy, steps=SimpleNamespace(seconds=predict)), loads


def test_the_limit_is_many_times_the_largest_pass_of_the_plan_with_a_floor():
    assert longest_step_s(None) == watchdogs.STUCK_AFTER_S
    plan, loads = plan_with_steps_of(0.5)
    assert longest_step_s(plan) == watchdogs.STUCK_AFTER_S
    assert loads[0].decode_rows == 8
    assert loads[0].decode_context == 40 * KV_BLOCK_TOKENS / 8
    assert loads[0].prompt_tokens == 64
    plan, _ = plan_with_steps_of(300.0)
    assert longest_step_s(plan) == 300.0 * watchdogs.STUCK_AFTER_PREDICTIONS


def test_the_stacks_show_where_other_threads_are():
    entered, leave = threading.Event(), threading.Event()

    def stuck_in_a_kernel():
        entered.set()
        leave.wait(30)

    thread = threading.Thread(target=stuck_in_a_kernel)
    thread.start()
    entered.wait(30)
    shown = stacks_of_all_threads()
    leave.set()
    thread.join()
    assert "in stuck_in_a_kernel" in shown
    assert "in test_the_stacks_show_where_other_threads_are" in shown
