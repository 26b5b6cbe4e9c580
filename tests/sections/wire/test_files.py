"""The number of files that ranks need, and the errors where the system allows fewer."""

import resource

import dask.array as da
import numpy as np
import pytest

from dask_p2p import iterate, spmd
from dask_p2p.errors import SectionError
from dask_p2p.sections.wire.streams import reserve_files
from tests.sections.support import nothing_is_left
from tests.support import mostly_slow, restart, result_of
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


def limit(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
    limits = client.run(resource.getrlimit, resource.RLIMIT_NOFILE)
    assert min(limits.values())[0] > 16 * 16


def test_a_need_beyond_the_hard_limit_is_refused_before_the_start(client, limited):
    limited(200, 200)
    y = spmd(summed, da.zeros(32, chunks=1), ranks=32)
    with pytest.raises(SectionError, match=r"of 32 ranks run, got a hard limit of 200\. Raise"):
        y.compute()
    assert np.array_equal(spmd(summed, da.zeros(4, chunks=1), ranks=4).compute(), np.full(4, 4.0))
    nothing_is_left(client)


@pytest.mark.parametrize("late", mostly_slow([0, 3], [3]))
def test_files_that_the_function_takes_end_the_section(client, limited, tmp_path, late):
    """The process without free files connects, or accepts a connection."""

    def function(ctx, x):
        if ctx.rank == late:
            limit(8, 400)  # as if the function had opened 400 files: the first ones are in use
            (tmp_path / "full").mkdir()  # fails in a second attempt
        wait_until((tmp_path / "full").exists)
        try:
            for step in range(1, ctx.size):  # a thread that waits in `accept` has one file
                ctx.sendrecv(1.0, (ctx.rank + step) % ctx.size, (ctx.rank - step) % ctx.size)
            return x
        finally:
            limit(400, 400)

    limited(400, 400)
    with pytest.raises(SectionError, match=r"one more open file .*got a limit of (8|400):"):
        spmd(function, da.zeros(4, chunks=1), ranks=4).compute()


def test_a_rank_that_starts_where_another_has_taken_all_files_says_so(client, limited):
    def start_late():
        limit(0, 400)
        try:
            with pytest.raises(SectionError, match="one more open file"):
                reserve_files(ranks=2, remote_ranks=2)
        finally:
            limit(400, 400)

    limited(400, 400)
    client.run(start_late)
