"""The number of files that ranks need, and the errors where the system allows fewer."""

from __future__ import annotations

import errno
import resource
import threading

import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate, spmd
from dask_p2p.errors import SectionError
from dask_p2p.sections.wire import streams as files
from tests.sections.support import nothing_is_left
from tests.support import BOUND_S, restart, result_of

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


class Limits:
    """Limits of a process that replace the system's."""

    def __init__(self, monkeypatch, soft, hard, opened=100):
        self.now = soft, hard
        monkeypatch.setattr(resource, "getrlimit", lambda which: self.now)
        monkeypatch.setattr(resource, "setrlimit", self.set)
        monkeypatch.setattr(files.os, "listdir", lambda path: range(opened))

    def set(self, which, limits):
        self.now = limits


def test_the_soft_limit_is_raised_as_far_as_needed(monkeypatch):
    limits = Limits(monkeypatch, 1024, 10_000)
    files.reserve_files(2, 4)
    assert limits.now == (1024, 10_000)
    files.reserve_files(16, 112)
    soft, hard = limits.now
    assert 100 + 16 * 112 < soft < 4000
    assert hard == 10_000


def test_a_hard_limit_that_is_too_low_is_named(monkeypatch):
    limits = Limits(monkeypatch, 1024, 1024)
    expected = "room for 1892 open files .* 16 of 128 ranks run, got a hard limit of 1024. Raise"
    with pytest.raises(SectionError, match=expected):
        files.reserve_files(16, 112)
    assert limits.now == (1024, 1024)


def test_errors_of_this_process_are_named():
    for number in (errno.EMFILE, errno.ENFILE):
        with pytest.raises(SectionError, match=r"one more open file .*Raise the hard limit"):
            files.check_files(OSError(number, "too many"))
    files.check_files(ConnectionRefusedError(errno.ECONNREFUSED, "not there"))


def limit(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def soft_limit():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.fixture
def limited(client):
    """Set the limits of all workers, for one test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft, hard: client.run(limit, soft, hard)
    restart(client)
    assert set(client.run(resource.getrlimit, resource.RLIMIT_NOFILE).values()) == {before}


def one_worker(client):
    return [min(client.scheduler_info()["workers"])]


def summed(ctx, x):
    return x + ctx.allreduce(1.0)


@pytest.mark.slow
def test_ranks_of_one_process_need_few_files(client, limited):
    """All pairs of 40 ranks would need more than twice the limit."""
    limited(512, 512)
    y = spmd(summed, da.zeros(40, chunks=1), ranks=40)
    future = client.compute(y, workers=one_worker(client), allow_other_workers=False)
    assert np.array_equal(result_of(client, future), np.full(40, 40.0))
    steps = iterate(lambda u: u[1:-1], da.arange(40, chunks=1), 1, steps=3, boundary="periodic")
    future = client.compute(steps, workers=one_worker(client), allow_other_workers=False)
    assert np.array_equal(result_of(client, future), np.arange(40))
    del future
    nothing_is_left(client)


@pytest.mark.slow
def test_ranks_of_several_processes_have_the_files_that_they_need(client, limited):
    """All pairs between two processes, which the soft limit of these does not allow."""
    limited(200, 4096)
    y = spmd(summed, da.zeros(32, chunks=1), ranks=32)
    assert np.array_equal(y.compute(), np.full(32, 32.0))
    assert min(client.run(soft_limit).values()) > 16 * 16


def test_a_need_beyond_the_hard_limit_is_refused_before_the_start(client, limited):
    limited(200, 200)
    y = spmd(summed, da.zeros(32, chunks=1), ranks=32)
    with pytest.raises(SectionError, match=r"of 32 ranks run, got a hard limit of 200\. Raise"):
        y.compute()
    assert np.array_equal(spmd(summed, da.zeros(4, chunks=1), ranks=4).compute(), np.full(4, 4.0))
    nothing_is_left(client)


@pytest.mark.parametrize("late", [0, 1])
def test_files_that_the_function_takes_end_the_section(client, limited, late):
    """The process without free files connects, or accepts a connection."""

    def function(ctx, x):
        held, full, ends = [], threading.Event(), threading.Event()

        def take_all():
            """Also files that other threads close meanwhile."""
            while not ends.is_set():
                try:
                    held.append(open("/dev/null"))  # noqa: SIM115
                except OSError:
                    full.set()
                    ends.wait(1e-4)

        if ctx.rank == late:
            threading.Thread(target=take_all, daemon=True).start()
            full.wait(BOUND_S)
        try:
            return x + ctx.allreduce(1.0)
        finally:
            ends.set()

    limited(400, 400)
    with pytest.raises(SectionError, match=r"one more open file .*got a limit of 400"):
        spmd(function, da.zeros(2, chunks=1), ranks=2).compute()
