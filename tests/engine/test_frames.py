"""Memory of failed tasks is freed, on a worker that never collects garbage."""

from __future__ import annotations

import gc
import os
import weakref

import dask.array as da
import numpy as np
import pytest
from distributed import get_worker

from dask_p2p import map_overlap, spmd
from dask_p2p.engine.frames import drops_frames
from dask_p2p.errors import TransferError, without_frames
from tests.support import result_of
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2, "threads_per_worker": 1}


def note(array):
    """Keep a weak reference to an array on its worker, and collect no garbage."""
    gc.disable()
    worker = get_worker()
    worker.noted = [*getattr(worker, "noted", ()), weakref.ref(array)]


def alive(dask_worker):
    noted = getattr(dask_worker, "noted", ())
    gone = all(ref() is None for ref in noted)
    return len(noted), gone


def check_all_is_gone(client):
    found = {}

    def all_is_gone():
        found.update(client.run(alive))
        assert sum(noted for noted, _ in found.values()), "something was noted"
        return all(gone for _, gone in found.values())

    wait_until(all_is_gone, state=lambda: found)


def test_of_a_rank_whose_function_raises(client):
    def function(ctx, x):
        made = np.ones(1000)
        note(made)
        ctx.barrier()
        if ctx.rank == 1:
            raise ZeroDivisionError("of rank 1")
        ctx.barrier()

    future = client.compute(spmd(function, da.zeros(4, chunks=2), ranks=2))
    with pytest.raises(ZeroDivisionError, match="of rank 1"):
        result_of(client, future)
    del future
    check_all_is_gone(client)


def test_of_a_rank_whose_peer_dies(client, tmp_path):
    def function(ctx, x, path):
        made = np.ones(1000)
        note(made)
        ctx.barrier()
        if ctx.rank == 1 and not path.exists():
            path.touch()
            os._exit(1)
        ctx.barrier()
        return x + 1

    y = spmd(function, da.zeros(4, chunks=2), ranks=2, path=tmp_path / "died")
    assert np.array_equal(y.compute(), np.ones(4))
    check_all_is_gone(client)


def test_of_a_task_of_a_layer(client):
    def function(block):
        made = block + 1
        note(made)
        raise ZeroDivisionError("of a block")

    x = da.zeros((4, 1000), chunks=(2, 500))
    future = client.compute(map_overlap(function, x, depth=1, boundary=0, meta=x._meta))
    with pytest.raises(ZeroDivisionError, match="of a block"):
        result_of(client, future)
    del future
    check_all_is_gone(client)


def raising():
    array = np.ones(3)
    kept = weakref.ref(array)
    try:
        try:
            raise OSError("cause")
        except OSError as exc:
            raise TransferError("failed") from exc
    except TransferError as exc:
        return exc, kept


def test_an_exception_that_is_kept_has_no_frames():
    exc, array = raising()
    assert array() is not None
    assert without_frames(exc) is exc
    assert array() is None
    assert str(exc) == "failed"
    assert exc.__traceback__ is exc.__cause__ is exc.__context__ is None


def test_on_other_schedulers_nothing_is_dropped():
    @drops_frames
    def function(x):
        raise ZeroDivisionError(str(x))

    with pytest.raises(ZeroDivisionError, match="3") as raised:
        function(3)
    assert raised.value.__traceback__ is not None
