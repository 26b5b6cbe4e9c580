"""A rank on its worker: exceptions of functions, checkpoints in memory."""

import asyncio
import itertools
import os
import threading
from concurrent.futures import wait
from unittest import mock

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Reschedule

from dask_p2p import iterate, spmd
from dask_p2p.errors import InputError, SectionError, TransferError
from dask_p2p.sections.gang import checkpoints as module
from dask_p2p.sections.gang import rank
from dask_p2p.sections.gang.checkpoints import Checkpoints, Period, SavedStates, States, host_arrays
from dask_p2p.sections.wire.connection import AttemptEndedError
from dask_p2p.transports.buffers import Segment
from tests.clock import Clock
from tests.sections.support import be_on_hosts, nothing_is_left, ranks_of, ranks_that_run
from tests.sections.wire.support import Gang
from tests.support import BOUND_S, in_process, noted, own_client, tls_client
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
            protocols = client.run(lambda dask_worker: ranks_of(dask_worker).reach.protocol)
            assert {*protocols.values()} == {"tls"}
            client.run(separate_hosts)
            x = x + 1 - 1


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


def test_a_checkpoint_has_room_of_two_generations_and_keeps_the_whole_one(monkeypatch):
    """One rank has a state of step 7: its attempt ended before the others had theirs.

    Another attempt goes on at 3, and comes to step 5. If that ended in the middle, and 3 was gone,
    all would begin at the start.
    """
    memories = [SavedStates() for _ in range(2)]
    for step, holders in ((2, memories), (3, memories), (7, memories[1:])):
        for saved in holders:
            saved.add(saved.open("x"), 1, step, [memoryview(b"%d" % step)])

    def steps_of(saved, to, *state):
        return {step for states in to.values() for step in states}

    seen = noted(monkeypatch, SavedStates, "add", steps_of)

    def save(rank, connections):
        states = States(memories[rank], "x", 3, (0, 1), lambda: None)
        checkpoints = Checkpoints(rank, ["a", "b"], connections, states)
        checkpoints.save(5, [np.zeros(1)])
        checkpoints.save(6, [np.zeros(1)])

    with Gang(2) as gang:
        gang.run(save)
    assert [steps - {5, 6} for steps in seen[:4]] == [{3}] * 4
    assert all(len(steps - {6}) < 2 for steps in seen[4:]), "and the one that is made"
    assert [set(dict(saved.steps("x"))[1]) for saved in memories] == [{5, 6}] * 2


def test_a_state_that_is_lost_meanwhile_ends_the_attempt():
    def restore(rank, connections):
        states = States(SavedStates(), "x", 10, (0, 1, 2), lambda: None)
        Checkpoints(rank, "abc", connections, states).read_state()

    with Gang(3) as gang:
        for future in gang.begin(restore):
            assert isinstance(future.exception(BOUND_S), AttemptEndedError)


def test_no_state_goes_before_a_newer_one_is_whole():
    """One rank lags behind: the others keep the states that it has, too."""
    memories = [SavedStates() for _ in range(5)]

    def save(rank, connections):
        states = States(memories[rank], "x", None, (), lambda: None)
        checkpoints = Checkpoints(rank, "abcde", connections, states)
        for step in (5,) if rank == 4 else (5, 10, 15, 20):
            checkpoints.save(step, [np.zeros(3)])

    with Gang(5) as gang:
        futures = gang.begin(save)
        futures[4].result(BOUND_S)
        assert not wait(futures[:4], 0.3).done
    assert all(5 in dict(saved.steps("x"))[rank] for rank, saved in enumerate(memories))


@pytest.mark.parametrize("step_s", [0.001, 0.3, 4.0, 50.0])
def test_checkpoints_are_due_after_some_time(monkeypatch, step_s):
    """Not much later than asked for; and time is seldom compared."""
    clock = Clock(0.0)
    monkeypatch.setattr(module, "time", clock)
    looks = []
    period, due_s = Period("30 s"), []
    for step in range(1, 1 + int(200 / step_s)):
        clock.now_s += step_s
        if period.is_due(step, lambda value: looks.append(1) or value):
            due_s.append(clock.now_s)
    assert all(30 <= b - a <= 30 + 2 * step_s for a, b in zip([0.0, *due_s], due_s, strict=False))
    assert len(due_s) >= 200 // (30 + 2 * step_s)
    assert len(looks) <= 30


def arrays(start=0.0):
    """Arrays whose sizes would leave the next array unaligned."""
    return [
        np.arange(3, dtype="u1") + np.uint8(start),
        (np.arange(12.0) + start).reshape(3, 4)[:, ::2],
        np.full((), start, "c16"),
        np.zeros((0, 3)),
    ]


@pytest.mark.parametrize(
    ("method", "error"),
    [
        (None, None),
        ("open", TransferError("they run on different hosts", scope="region")),
        ("make", OSError(12, "no memory")),
    ],
)
def test_states_come_back(method, error, monkeypatch):
    """The second of three workers is lost. Its rank runs again on the first worker."""
    if method is not None:  # a worker that does not see the memory gets the bytes
        monkeypatch.setattr(Segment, method, mock.Mock(side_effect=error))
    memories, notified, addresses = [SavedStates() for _ in range(3)], [], [set() for _ in range(3)]

    def save(rank, connections):
        def notify():
            assert memories[rank].gangs == ["x"], "or they might be dropped before they are there"
            notified.append(rank)

        states = States(memories[rank], "x", None, (), notify)
        checkpoints = Checkpoints(rank, "abc", connections, states)
        assert checkpoints.read_state() == (0, None)
        for step in range(1, 9):
            checkpoints.save(step, arrays(step + rank))
            addresses[rank].add(memories[rank].get("x", rank, step).obj.ctypes.data)
        checkpoints.save(9, [])
        checkpoints.save(10, [np.zeros(rank)])
        checkpoints.save(11, arrays(11 + rank))
        checkpoints.close()

    with Gang(3) as gang:
        gang.run(save)
    assert sorted(notified) == [0, 1, 2], "once each"
    assert all(len(of_rank) == 2 for of_rank in addresses), "memory is used again"
    assert [dict(saved.steps("x")) for saved in memories] == [
        {rank: [10, 11] for rank in ranks} for ranks in ((0, 2), (1, 0), (2, 1))
    ]
    memories[1] = memories[0]  # its own states are gone

    def restore(rank, connections):
        states = States(memories[rank], "x", 11, (0, 2, 2), lambda: None)
        checkpoints = Checkpoints(rank, "aac", connections, states)
        step, state = checkpoints.read_state()
        assert step == 11
        assert checkpoints.read_state() == (0, None), "once"
        specs = [(array.dtype, array.shape) for array in arrays()]
        for array, expected in zip(host_arrays(state, specs), arrays(11 + rank), strict=True):
            assert np.array_equal(array, expected)

    with Gang(3) as gang:
        gang.run(restore)
