"""When an idle engine starts."""

from raymoe.engine.engine import BatchingWindow


def make_rule(linger_s=1000.0, expected_calls=None, num_rows=1) -> BatchingWindow:
    rule = BatchingWindow(pool_rows=4, linger_s=linger_s, expected_calls=expected_calls)
    for _ in range(num_rows):
        rule.row_came()
    return rule


def test_without_rows_it_waits_until_something_comes():
    assert make_rule(num_rows=0).wait_s(0) is None


def test_with_some_rows_it_waits_at_most_the_linger_time():
    assert 999.0 < make_rule().wait_s(1) <= 1000.0
    assert make_rule(linger_s=0.0).wait_s(1) == 0.0


def test_a_full_pool_starts():
    assert make_rule().wait_s(4) == 0.0


def test_all_callers_inside_start():
    rule = make_rule(expected_calls=2)
    rule.num_calls_in_flight = 1
    assert rule.wait_s(1) > 0.0
    rule.num_calls_in_flight = 2
    assert rule.wait_s(1) == 0.0


def test_hurry_counts_until_the_engine_started():
    rule = make_rule()
    rule.start_now()
    assert rule.wait_s(1) == 0.0
    rule.started()
    rule.row_came()
    assert rule.wait_s(1) > 0.0
