"""Exceptions of functions: all ranks raise them by name, and no worker ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Reschedule

from dask_p2p import iterate, spmd
from dask_p2p.errors import InputError, SectionError
from dask_p2p.sections.gang import rank
from dask_p2p.sections.wire.connection import AttemptEndedError
from tests.sections.support import be_on_hosts, nothing_is_left, ranks_of, ranks_that_run
from tests.support import BOUND_S, in_process, own_client, tls_client
from tests.transports.loopback import wait_until


class CannotBeMadeAgainError(Exception):
    def __init__(self, first, second):
        super().__init__("cannot be pickled")
        self.lock = threading.Lock()


class SaysNothingError(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


WHAT = {
    "StopIteration: at rank 1": lambda: StopIteration("at rank 1"),
    "Reschedule: ": Reschedule,
    "SystemExit: 3": lambda: SystemExit(3),
    "KeyboardInterrupt: ": KeyboardInterrupt,
    "GeneratorExit: ": GeneratorExit,
    "CancelledError: without a cause": lambda: asyncio.CancelledError("without a cause"),
    "CannotBeMadeAgainError: cannot be pickled": lambda: CannotBeMadeAgainError(1, 2),
    "SaysNothingError: ": SaysNothingError,
    "ValueError: xxxxxxxxxx": lambda: ValueError("x" * 2_000_000),
}


def raising(ctx, x, what):
    if ctx.rank == ctx.size - 1:
        raise WHAT[what]()
    ctx.barrier()
    return x


@pytest.mark.parametrize("what", WHAT)
def test_all_see_by_name_what_one_raises(client, what):
    workers = {*client.run(os.getpid).values()}
    x = da.ones((4, 2), chunks=(1, 2))
    with pytest.raises(SectionError, match=rf"the function raised {what}.* on rank 3"):
        spmd(raising, x, ranks=4, what=what).compute()
    nothing_is_left(client)
    assert {*client.run(os.getpid).values()} == workers


def test_one_rank_alone_ends_no_worker_either():
    x = da.ones((4, 2), chunks=(1, 2))
    with pytest.raises(SectionError, match="the function raised SystemExit: 3 on rank 0"):
        spmd(raising, x, ranks=1, what="SystemExit: 3").compute(scheduler="sync")
    with pytest.raises(ValueError, match="xxx"):
        spmd(raising, x, ranks=1, what="ValueError: xxxxxxxxxx").compute(scheduler="sync")


def summed(ctx, x):
    return x + ctx.allreduce(1.0)


def test_ranks_run_on_workers_without_the_plugin():
    """The array is made before the cluster, so the plugin is not registered."""
    y = spmd(summed, da.ones((4, 2), chunks=(2, 2)), ranks=2)
    options = {"p2p.transports.order": ["cma", "ucx", "comm"]}  # a rank looks UCX up in the plugin
    z = iterate(lambda u: u[1:-1], da.ones((4, 2), chunks=(2, 2)), {0: 1}, 3, ranks=2)
    with dask.config.set(options):
        w = spmd(summed, da.zeros((4, 2), chunks=(2, 2)), ranks=2)
    with own_client() as client:
        for lazy, value in ((w, 2.0), (y, 3.0), (z, 1.0)):
            assert np.array_equal(client.compute(lazy).result(), np.full((4, 2), value))


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_a_task_that_computes_with_another_scheduler_is_refused(client, scheduler):
    def inner(block):
        y = spmd(summed, da.ones((4, 2), chunks=(2, 2)), ranks=2)
        return block + y.compute(scheduler=scheduler).sum()

    outer = da.ones(2, chunks=1).map_blocks(inner, dtype=float, meta=np.ones(0))
    for future in (client.submit(inner, 1), client.compute(outer)):
        with pytest.raises(InputError, match="got another scheduler of Dask"):
            future.result(BOUND_S)
    nothing_is_left(client)


# --- ranks on workers of this process: the end of a worker, and messages that no rank sends


def endless(ctx, x):
    while True:
        ctx.barrier()


async def test_no_thread_outlives_its_worker():
    async with in_process(2) as (cluster, client):
        y = spmd(endless, da.ones((4, 2), chunks=(1, 2)), ranks=4)
        future = client.compute(y)
        await asyncio.to_thread(wait_until, lambda: ranks_that_run() == 4)
        for worker in list(cluster.workers.values()):
            await worker.close(nanny=False)
        await asyncio.to_thread(wait_until, lambda: ranks_that_run() == 0)
        assert not future.done()


async def test_ranks_pause_before_another_attempt(monkeypatch):
    """Dask may not have noticed yet that a worker is lost."""

    def broken(ctx, x):
        raise AttemptEndedError("a connection broke")

    failures = []
    monkeypatch.setattr(rank, "pause_s", lambda count: failures.append(count) or 0.0)
    async with in_process(2) as (_, client):
        y = spmd(broken, da.ones((4, 2), chunks=(2, 2)), ranks=2)
        with pytest.raises(SectionError, match="8 attempts ended early, the last one because"):
            await client.compute(y)
    assert {*failures} == {*range(1, 8)}


def test_encrypted_clusters_have_encrypted_connections():
    """Ranks of one host would use Unix sockets, so each rank gets a host of its own."""

    def separate_hosts(dask_worker):
        be_on_hosts(map("kernel-{}".format, itertools.count()).__next__)

    x = da.ones((4, 2), chunks=(1, 2))
    with tls_client() as client:
        for _ in range(2):
            y = spmd(lambda ctx, x: x * ctx.allreduce(1), x, ranks=4)
            assert (y.compute() == 4).all()
            reached = client.run(protocol)
            assert {*reached.values()} == {"tls"}
            client.run(separate_hosts)
            x = x + 1 - 1


def protocol(dask_worker):
    return ranks_of(dask_worker).reach.protocol


def test_dask_takes_fewer_samples_while_there_are_ranks():
    def sampled_ms(worker):
        return worker.periodic_callbacks["profile"].callback_time

    async def main():
        async with in_process(2) as (cluster, client):
            workers = list(cluster.workers.values())
            workers[1].periodic_callbacks["profile"].callback_time = 250
            y = spmd(endless, da.ones((4, 2), chunks=(1, 2)), ranks=4)
            future = client.compute(y)
            await asyncio.to_thread(wait_until, lambda: ranks_that_run() == 4)
            assert [sampled_ms(worker) for worker in workers] == [100, 250]
            await future.cancel()
            await asyncio.to_thread(wait_until, lambda: sampled_ms(workers[0]) == 10)
            assert sampled_ms(workers[1]) == 250

    with dask.config.set({"distributed.worker.profile.enabled": True}):
        asyncio.run(main())
