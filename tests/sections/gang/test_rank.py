"""Exceptions of functions: all ranks raise them by name, and no worker ends."""

from __future__ import annotations

import asyncio
import os
import threading

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, Reschedule

from dask_p2p import iterate, spmd
from dask_p2p.errors import InputError, SectionError
from tests.sections.support import nothing_is_left
from tests.support import BOUND_S, own_client


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


@pytest.mark.cluster
async def test_ranks_run_for_an_asynchronous_client():
    with dask.config.set({"p2p.transports.order": ["cma", "ucx", "comm"]}):
        y = spmd(summed, da.ones((4, 2), chunks=(2, 2)), ranks=2)

    async with Client(n_workers=2, asynchronous=True, dashboard_address=":0") as client:
        assert np.array_equal(await client.compute(y), np.full((4, 2), 3.0))
        z = spmd(summed, da.zeros((4, 2), chunks=(2, 2)), ranks=2)
        assert np.array_equal(await client.compute(z), np.full((4, 2), 2.0))


def unchanged(value):
    return value


def test_ranks_run_for_arguments_of_delayed_functions(client):
    y = spmd(summed, da.ones((4, 2), chunks=(1, 2)), ranks=4)  # Dask renames its tasks
    lazy = [dask.delayed(unchanged)(y), y, dask.delayed(unchanged)(y)]
    for found in [future.result(BOUND_S) for future in client.compute(lazy)]:
        assert np.array_equal(found, np.full((4, 2), 5.0))
    nothing_is_left(client)


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


here = {}  # values for functions that are pickled by their names


def up(block):
    return here["gpu"].written(block)


def down(block):
    return here["gpu"].read(block)


def test_ranks_of_gpus_run_on_workers_without_the_plugin(gpu):
    here["gpu"] = gpu
    x, meta = da.from_array(np.ones((4, 2)), chunks=(2, 2)), gpu.empty((0, 0), "f8")
    y = spmd(lambda ctx, x: x, x.map_blocks(up, dtype="f8", meta=meta), ranks=2)
    with own_client(processes=False) as client:
        back = y.map_blocks(down, dtype="f8", meta=np.empty((0, 0)))
        assert np.array_equal(client.compute(back).result(), np.ones((4, 2)))
    here.clear()
