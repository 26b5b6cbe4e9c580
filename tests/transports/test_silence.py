from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from dask_p2p.config import options
from dask_p2p.errors import BlockUnavailableError, SilentError, TransferError, UnreachableError
from dask_p2p.transports import silence
from dask_p2p.transports.silence import SilenceLog, is_given_up
from tests.clock import Clock

OPTIONS = replace(options(), request_timeout_s=30.0, attempts=4)
UNREACHABLE, SILENT = UnreachableError("no answer"), SilentError("no message")


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(silence, "perf_counter", clock)
    return clock


@pytest.fixture
def log():
    return SilenceLog()


def record_failure(log, clock, start_s, error=UNREACHABLE, holder="a", now_s=None):
    """An attempt waits for a holder, and notes how it failed."""
    clock.now_s = start_s + OPTIONS.request_timeout_s if now_s is None else now_s
    log.record_failure(holder, "ucx", error, start_s, OPTIONS)
    return clock.now_s


def asks(log, start_s, holder="a", transport="ucx"):
    """Whether an attempt asks the holder."""
    try:
        log.check(holder, transport, start_s, OPTIONS)
    except TransferError:
        return False
    return True


@pytest.mark.parametrize("error", [TransferError("broken"), BlockUnavailableError("gone")])
def test_other_failures_are_no_silence(log, clock, error):
    record_failure(log, clock, 0.0, error)
    assert asks(log, 0.0)
    assert log.lasted_s("a", "ucx") == 0.0


@pytest.mark.parametrize(("error", "transport"), [(UNREACHABLE, None), (SILENT, "ucx")])
def test_what_comes_from_a_holder_ends_its_silence(log, clock, error, transport):
    record_failure(log, clock, 0.0, error)
    record_failure(log, clock, 31.0, error)
    log.record_answer("a", transport if transport is None else "comm")
    log.record_answer("b")
    assert asks(log, 0.0) is (transport is None)
    log.record_answer("a", transport)
    assert asks(log, 0.0)
    assert log.lasted_s("a", "ucx") == 0.0


def test_it_lasts_from_one_attempt_to_the_next_whichever_tasks_they_are_at(log, clock):
    start_s = 0.0
    for attempt in range(OPTIONS.attempts):
        assert asks(log, start_s)
        assert is_given_up(OPTIONS, log.lasted_s("a", "comm")) is False
        end_s = record_failure(log, clock, start_s)
        assert log.lasted_s("a", "comm") == attempt * 30.5
        start_s = end_s + 0.5
    assert is_given_up(OPTIONS, log.lasted_s("a", "comm"))


def test_threads_that_wait_at_the_same_time_count_once(log, clock):
    """However many there are, there is one attempt more in 30 seconds, and none is spent sooner."""
    record_failure(log, clock, 0.0)
    for start_s in range(1, 30):
        record_failure(log, clock, float(start_s))
    assert log.lasted_s("a", "comm") == 0.0
    assert asks(log, 30.1), "it has begun after the silence was found"
    record_failure(log, clock, 30.1)
    assert log.lasted_s("a", "comm") == pytest.approx(30.1)


def test_a_holder_that_nobody_asked_for_long_is_not_known_to_be_silent(log, clock):
    end_s = record_failure(log, clock, 0.0)
    assert log.is_silent("a", end_s + 32.0, OPTIONS)
    assert not log.is_silent("a", end_s + 32.1, OPTIONS)
    record_failure(log, clock, end_s + 32.1)
    assert log.lasted_s("a", "comm") == 0.0


def test_one_that_is_given_up_fails_tasks_at_once_for_two_seconds_and_is_then_asked(log, clock):
    record_failure(log, clock, 0.0)
    end_s = record_failure(log, clock, 31.0, now_s=200.0)
    for start_s in (end_s + 1.0, end_s + 2.0):
        assert not asks(log, start_s)
        record_failure(log, clock, start_s, now_s=start_s)  # which has not asked
    assert asks(log, end_s + 2.1)
    record_failure(log, clock, end_s + 2.1)
    assert is_given_up(OPTIONS, log.lasted_s("a", "comm"))


def test_it_does_not_grow_with_the_holders_of_a_long_life(log, clock):
    for number in range(10_000):
        record_failure(log, clock, number * 60.0, holder=f"{number}")
    assert len(log.known) <= 3600 / 60


@pytest.mark.parametrize(
    "act",
    [
        lambda log: log.record_failure("a", "ucx", SILENT, 1e9, OPTIONS),
        lambda log: log.on_worker_left("a"),
    ],
    ids=["record_failure", "left"],
)
def test_what_one_thread_hears_is_not_lost_to_another_one(log, act):
    log.record_failure("b", "ucx", SILENT, 1e9, OPTIONS)
    hearing = threading.Thread(target=log.record_answer, args=("b", "ucx"))

    class Watched(dict):
        def items(self):
            seen = list(super().items())
            hearing.start()
            hearing.join(0.2)
            return seen

    log.known = Watched(log.known)
    act(log)
    hearing.join()
    assert ("b", "ucx") not in log.known
