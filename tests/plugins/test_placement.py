"""What Dask's scheduler decides otherwise for this package's tasks."""

import time
from collections import Counter
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, get_worker, wait

import dask_p2p
from dask_p2p.cli.cluster import count_wrong, indexed_array
from dask_p2p.engine.task import PLUGIN_NAME, WaitTask
from dask_p2p.plugins.placement import (
    Overlay,
    allowed_workers,
    count_held_elements,
    is_full,
    overlay_memory_check,
    place_rank,
    unstarted,
)
from dask_p2p.plugins.registration import workers_of
from tests.sections.schedulers import Scheduler, Task, ranks
from tests.support import in_process, indexed, result_of


def test_an_overlay_forwards_calls_when_it_is_not_wanted():
    is_wanted = [True]
    overlay = Overlay(lambda: "Dask's", lambda original: f"not {original()}", lambda: is_wanted[0])
    assert overlay() == "not Dask's"
    # A second one takes the first one's place.
    overlay = Overlay(overlay, lambda original: f"never {original()}", lambda: is_wanted[0])
    assert overlay() == "never Dask's"
    is_wanted[0] = False
    assert overlay() == "Dask's"


def test_other_tasks_are_checked_by_dask():
    worker = SimpleNamespace(address="a", memory_limit=7)
    scheduler = SimpleNamespace(
        worker_plugins={PLUGIN_NAME: b""},
        _add_to_processing=lambda ts, ws, stimulus_id: ws.memory_limit,
    )
    overlay_memory_check(scheduler, lambda: True, lambda address: None)
    check = scheduler._add_to_processing
    (task,) = dask_p2p.transpose(da.ones((2, 2))).dask.layers.popitem()[1].values()
    for spec, limit in ((None, 7), (task, 0)):
        ts = SimpleNamespace(run_spec=spec)
        assert check(ts, worker, stimulus_id="") == limit
        assert worker.memory_limit == 7
    scheduler.worker_plugins.clear()  # whole blocks will move
    assert check(ts, worker, stimulus_id="") == 7


@pytest.mark.slow
def test_an_array_larger_than_one_workers_memory():
    limit_bytes = 440 * 2**20  # a worker that makes one block has 360 MiB
    shape = (7800, 7400)
    with dask_p2p.local_cluster(6, memory_limit=limit_bytes) as cluster, Client(cluster) as client:
        x = client.persist(indexed_array(shape, (1300, 7400), "f8"))
        wait(x)
        assert x.nbytes > limit_bytes > dask_p2p.estimate(x).total_bytes
        y = client.persist(dask_p2p.transpose(x))
        wait(y)
        del x
        wrong_count = count_wrong(y, shape, (1, 0), "numpy", np.dtype("f8"))
        assert result_of(client, client.compute(wrong_count)) == 0


# --- placement ---


def placed(client, shape, chunks, worker_of):
    """A persisted array whose blocks lie where `worker_of` an index says, by number."""
    addresses = sorted(workers_of(client))
    with dask.annotate(workers=lambda key: addresses[worker_of(key[1:])], allow_other_workers=True):
        x = da.from_array(indexed(shape, float), chunks=chunks)
    x = client.persist(x, optimize_graph=False)
    wait(x)
    return x


def shares(client, x, lazy, y):
    """Which share of what is read of `x` moved, which had to, and the blocks of each worker."""
    wait(y)
    holders, readers = client.who_has(x), client.who_has(y)
    blocks, moved, least, read = Counter(), 0, 0, 0
    for key, task in lazy.dask.layers[lazy.name].items():
        elements_of = count_held_elements(task, holders)
        elements = sum(task.plan.source_elements(task.index))
        (reader,) = readers[key]
        blocks[reader] += 1
        read += elements
        moved += elements - elements_of[reader]
        least += elements - max(elements_of.values())
    return moved / read, least / read, sorted(blocks.values())


def by_rows(blocks):
    return lambda index: index[0] * 4 // blocks


CASES = {
    "blocks with halos": (
        ((64, 64), (16, 16), by_rows(4)),
        lambda x: dask_p2p.map_overlap(np.negative, x, 1),
    ),
    "a grid to slabs": (((64, 64), (16, 16), by_rows(4)), lambda x: dask_p2p.rechunk(x, (16, -1))),
    "small blocks to slabs": (
        ((64, 64), (4, 4), by_rows(16)),
        lambda x: dask_p2p.rechunk(x, (8, -1)),
    ),
    "shifted slabs": (
        ((800, 8), (100, 8), by_rows(8)),
        lambda x: dask_p2p.rechunk(x, ((101, *(100,) * 6, 99), (8,))),
    ),
    "few blocks to many": (((400, 8), (100, 8), by_rows(4)), lambda x: dask_p2p.rechunk(x, (6, 8))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("without_stealing")
def test_no_more_moves_than_must(client, case):
    dask_p2p.register(client)
    (shape, chunks, worker_of), operation = CASES[case]
    x = placed(client, shape, chunks, worker_of)
    lazy = operation(x)
    y = client.persist(lazy)
    moved, least, blocks = shares(client, x, lazy, y)
    assert moved <= least * 1.01
    assert len(blocks) == 4
    values = operation(da.from_array(indexed(shape, float), chunks=chunks))
    np.testing.assert_array_equal(y.compute(), values.compute(scheduler="sync"))


@pytest.mark.parametrize("worker_of", [by_rows(8), lambda index: max(0, index[0] - 4)])
@pytest.mark.usefixtures("without_stealing")
def test_a_transpose_is_spread_evenly(client, worker_of):
    """Though the first worker holds a few rows, or four slabs, more than the others."""
    dask_p2p.register(client)
    x = placed(client, (403, 16), ((53, *(50,) * 7), (16,)), worker_of)
    lazy = dask_p2p.transpose(x)
    y = client.persist(lazy)
    moved, _, blocks = shares(client, x, lazy, y)
    assert blocks == [2, 2, 2, 2]
    assert moved < 0.76
    np.testing.assert_array_equal(y.compute(), indexed((403, 16), float).T)


def test_restrictions_hold(client):
    dask_p2p.register(client)
    addresses = sorted(workers_of(client))
    x = placed(client, (64, 8), (16, 8), by_rows(4))
    y = client.persist(dask_p2p.rechunk(x, (8, 8)), workers=[addresses[1]])
    wait(y)
    assert set().union(*client.who_has(y).values()) == {addresses[1]}


@pytest.mark.slow
def test_work_is_stolen_from_who_holds_everything(client):
    dask_p2p.register(client)

    def slow(block):
        time.sleep(0.2)
        return -block

    x = placed(client, (320, 8), (10, 8), lambda index: 0)
    lazy = dask_p2p.map_overlap(slow, x, 1, meta=np.empty((0, 0)))
    y = client.persist(lazy)
    *_, blocks = shares(client, x, lazy, y)
    assert len(blocks) > 1
    np.testing.assert_array_equal(y.compute(), -indexed((320, 8), float))


def place(ctx, x):
    return np.full_like(x, int(get_worker().name))


async def test_the_ranks_of_a_gang_are_spread():
    """Though one worker has all blocks, and Dask would place all ranks there."""

    async with in_process(3, threads_per_worker=2) as (cluster, client):
        await dask_p2p.register(client)
        holder = cluster.workers[0].address
        x = client.persist(da.ones((12, 2), chunks=(1, 2)), workers=[holder])
        await wait(x)
        for ranks in (3, 6):
            y = await client.compute(dask_p2p.spmd(place, x, ranks=ranks))
            assert Counter(y[:, 0]) == {0: 4, 1: 4, 2: 4}


async def test_blocks_of_ranks_are_handed_out_where_they_are():
    """However small they are, and nothing is sent for it, though all wait for one another."""

    async with in_process(3, threads_per_worker=1) as (cluster, client):
        await dask_p2p.register(client)
        x = da.ones((12, 2), chunks=(1, 2))
        for _ in range(3):
            y = client.persist(dask_p2p.spmd(place, x, ranks=3))
            await wait(y)
            blocks = await client.gather(client.compute([*y.blocks.ravel()]))
            made_on = [cluster.workers[int(block[0, 0])].address for block in blocks]
            holders = await client.who_has(y)
            assert [holders[key] for key in sorted(holders)] == [[address] for address in made_on]
            ranks = {key for key in cluster.scheduler.tasks if "ranks" in str(key)}
            for worker in cluster.workers.values():
                transfers = worker.transfer_outgoing_log
                assert not any(ranks & {*transfer["keys"]} for transfer in transfers)
            del y, blocks


GPU = {"GPU": 1}


class Block:
    """An input that some workers have."""

    def __init__(self, *workers):
        self.who_has = workers

    def get_nbytes(self):
        return 100


def placed_ranks(scheduler, *tasks):
    """Place the tasks of a gang one after the other; return their workers."""
    commit = Task(("x", "commit"), is_rank=False)
    commit.run_spec, commit.dependencies = object.__new__(WaitTask), {*tasks}
    for worker in scheduler.workers.values():
        worker.occupancy = 0.0
    for task in tasks:
        task.dependents = {commit}
    for task in tasks:
        task.processing_on = place_rank(scheduler, task)
    return [task.processing_on and task.processing_on.address for task in tasks]


def test_a_rank_leaves_the_worker_that_another_needs():
    scheduler = Scheduler(GPU, GPU)
    anywhere, only = Task(("x", 0), GPU), Task(("x", 1), GPU, workers={"a"})
    anywhere.dependencies = {Block(scheduler.workers["a"])}
    assert placed_ranks(scheduler, anywhere, only) == ["b", "a"]


def test_a_worker_with_more_threads_gets_more_ranks():
    scheduler = Scheduler({}, {})
    scheduler.workers["b"].nthreads = 3
    assert Counter(placed_ranks(scheduler, *ranks(4))) == {"a": 1, "b": 3}
    assert Counter(placed_ranks(scheduler, *ranks(2))) == {"a": 1, "b": 1}


def test_ranks_go_where_their_inputs_are():
    """Also two ranks of one worker that follow each other."""
    scheduler = Scheduler({}, {})
    for worker in scheduler.workers.values():
        worker.nthreads = 2
    tasks = ranks(4)
    for task, name in zip(tasks, "bbaa", strict=True):
        task.dependencies = {Block(scheduler.workers[name])}
    assert placed_ranks(scheduler, *tasks) == ["b", "b", "a", "a"]
    for task in tasks:
        task.processing_on, task.dependencies = None, {Block(scheduler.workers["b"])}
    assert Counter(placed_ranks(scheduler, *tasks)) == {"a": 2, "b": 2}


def test_ranks_without_room_wait_somewhere():
    assert Counter(placed_ranks(Scheduler(GPU), *ranks(2, GPU))) == {"a": 2}
    assert placed_ranks(Scheduler({}), *ranks(2, GPU)) == [None, None]
    scheduler = Scheduler(GPU, {"GPU": 3})
    scheduler.workers["a"].nthreads = 3
    assert Counter(placed_ranks(scheduler, *ranks(4, GPU))) == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("restrictions", "expected_workers"),
    [
        ({}, "abc"),
        ({"needs": GPU}, "ab"),
        ({"workers": {"a", "gone"}}, "a"),
        ({"workers": {"a"}, "hosts": {"host-c"}}, "ac"),
        ({"workers": {"c"}, "needs": GPU}, ""),
        ({"workers": {"gone"}}, ""),
        ({"workers": {"gone"}, "loose": True}, "abc"),
        ({"workers": {"c"}, "needs": GPU, "loose": True}, "ab"),
    ],
)
def test_restrictions_are_those_of_dask(restrictions, expected_workers):
    scheduler = Scheduler(GPU, GPU, {})
    task = Task(("x", 0), **restrictions)
    assert {ws.address for ws in allowed_workers(scheduler, task)} == {*expected_workers}
    assert placed_ranks(scheduler, task)[0] in (*expected_workers, None)


def test_ranks_that_did_not_start_avoid_long_tasks():
    scheduler = Scheduler({}, {})
    (task,) = ranks(1)
    task.dependencies = {Block(scheduler.workers["a"])}
    scheduler.workers["a"].executes(Task("busy", is_rank=False), 5.0)
    assert is_full(scheduler.workers["a"], task)
    assert placed_ranks(scheduler, task) == ["a"], "it may end soon"
    unstarted.add(task)
    task.processing_on = None
    assert placed_ranks(scheduler, task) == ["b"]
