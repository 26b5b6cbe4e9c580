"""What Dask's scheduler decides otherwise for this package's tasks."""

from __future__ import annotations

from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
from distributed import Client, wait

import dask_p2p
from dask_p2p.indexed import count_wrong, indexed_array
from dask_p2p.overlay import Overlay
from dask_p2p.placement import overlay_memory_check
from dask_p2p.task import PLUGIN_NAME
from tests.support import result_of

MEBIBYTE = 2**20


class Scheduler:
    """What an overlay needs of Dask's."""

    def __init__(self):
        self.worker_plugins = {PLUGIN_NAME: b""}

    def _add_to_processing(self, ts, ws, stimulus_id):
        return ws.memory_limit

    def other(self):
        return "Dask's"


def test_an_overlay_goes_when_it_is_not_wanted():
    wanted = [True]
    scheduler = Scheduler()
    Overlay(scheduler, "other", lambda original: f"not {original()}", lambda: wanted[0])
    assert scheduler.other() == "not Dask's"
    # A second one takes the first one's place, and what it leaves behind is as it was.
    Overlay(scheduler, "other", lambda original: f"never {original()}", lambda: wanted[0])
    assert scheduler.other() == "never Dask's"
    wanted.clear()
    wanted.append(False)
    assert scheduler.other() == "Dask's"
    assert "other" not in vars(scheduler)


def test_an_overlay_leaves_alone_who_came_after_it():
    scheduler = Scheduler()
    overlay = Overlay(scheduler, "other", lambda original: "ours", lambda: False)
    scheduler.other = theirs = lambda: f"{overlay()}, and theirs"
    assert scheduler.other() == "Dask's, and theirs"
    assert vars(scheduler)["other"] is theirs


def test_other_tasks_are_checked_by_dask():
    scheduler, worker = Scheduler(), SimpleNamespace(address="a", memory_limit=7)
    overlay_memory_check(scheduler, lambda: True, lambda address: None)
    (task,) = dask_p2p.transpose(da.ones((2, 2))).dask.layers.popitem()[1].values()
    for spec, limit in ((None, 7), (task, 0)):
        ts = SimpleNamespace(run_spec=spec)
        assert scheduler._add_to_processing(ts, worker, stimulus_id="") == limit
        assert worker.memory_limit == 7
    scheduler.worker_plugins.clear()  # whole blocks will move
    assert scheduler._add_to_processing(ts, worker, stimulus_id="") == 7


@pytest.mark.parametrize("method", [None, lambda self, ts, worker: None])
def test_another_dask_is_left_alone(method):
    cls = type("Other", (), {"_add_to_processing": method} if method else {})
    scheduler = cls()
    assert overlay_memory_check(scheduler, lambda: True, lambda address: None) is None
    assert vars(scheduler) == {}


def _transposed(client, shape, n_blocks, limit_bytes):
    """Transpose an array that is larger than each worker's memory; check every element."""
    x = client.persist(indexed_array(shape, ((shape[0] // n_blocks,) * n_blocks, shape[1:]), "f8"))
    wait(x)
    assert x.nbytes > limit_bytes
    assert dask_p2p.estimate(x).total_bytes < limit_bytes
    y = client.persist(dask_p2p.transpose(x))
    wait(y)
    del x
    assert (
        result_of(client, client.compute(count_wrong(y, shape, (1, 0), "numpy", np.dtype("f8"))))
        == 0
    )


def test_an_array_larger_than_one_workers_memory():
    limit_bytes = 400 * MEBIBYTE
    with dask_p2p.local_cluster(6, memory_limit=limit_bytes) as cluster, Client(cluster) as client:
        _transposed(client, (7200, 7400), 6, limit_bytes)
