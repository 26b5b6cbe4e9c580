"""Fused arrays on a cluster of two workers with Dask's default settings."""

from __future__ import annotations

import operator
import threading
from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest
from dask.highlevelgraph import HighLevelGraph
from distributed import wait
from hypothesis import HealthCheck, given, settings

import dask_p2p
from dask_p2p.engine.task import RankTask
from dask_p2p.errors import SectionError
from tests.fusing.support import check_blocks, generated, graphs, smooth, waiting
from tests.sections.support import nothing_is_left
from tests.support import BOUND_S
from tests.transports.loopback import wait_until

CLUSTER = {"n_workers": 2}


def ranks_in(x):
    """Number of ranks in the graph of an array."""
    tasks = x.__dask_graph__().to_dict().values()
    return sum(isinstance(task, RankTask) for task in tasks)


def array(n=64, rows=8):
    values = np.random.default_rng(0).integers(-99, 99, (n, n)) / 8  # sums are exact
    return values, da.from_array(values, chunks=(rows, n))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs())
def test_random_graphs_are_equal_bit_for_bit(client, arrays):
    fused = dask_p2p.fused(*arrays)
    assert all(ranks_in(y) == ranks_in(fused[0]) <= 2 for y in fused)
    for x, y in zip(arrays, fused, strict=True):
        assert (y.shape, y.chunks, y.dtype) == (x.shape, x.chunks, x.dtype)
    for expected, got in zip(dask.compute(*arrays), dask.compute(*fused), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


def test_a_program_as_one_writes_it(client):
    _, x = array()
    for _ in range(10):
        x = dask_p2p.map_overlap(smooth, x, depth={0: 1}, boundary="periodic", dtype=x.dtype)
        x = x / abs(x).max()
    y = dask_p2p.fused(dask_p2p.transpose(x))
    assert ranks_in(y) == 2
    assert y.compute().tobytes() == dask_p2p.transpose(x).compute().tobytes()


def test_inputs_on_workers_and_in_functions(client):
    values, x = array()
    on_workers = client.persist(x)
    scaled = on_workers.map_blocks(np.multiply, client.submit(float, 3), dtype=float)
    y = dask_p2p.fused(dask_p2p.transpose(on_workers + scaled))
    del on_workers, scaled
    np.testing.assert_array_equal(y.compute(), values.T + 3 * values.T)
    np.testing.assert_array_equal(y[:5].compute(), (values.T + 3 * values.T)[:5])


def test_fused_arrays_are_arrays_of_dask(client):
    values, x = array()
    y = dask_p2p.fused(x.T + 1)
    np.testing.assert_array_equal((dask_p2p.rechunk(y, (-1, 7)) * 2).compute(), (values.T + 1) * 2)
    z = client.persist(y)
    wait(z)
    np.testing.assert_array_equal(dask_p2p.fused(z.T - 1).compute(), values)
    first, second = dask.compute(y, x + 1)  # which have tasks in common
    np.testing.assert_array_equal(first.T, second)
    del y, z


def test_other_arrays_of_the_same_inputs(client):
    """The inputs of the gang are a part of those of the other array."""
    x = da.map_blocks(generated, (12, 8), 0, chunks=((3, 3, 3, 3), (8,)), dtype=float)
    part, whole = dask_p2p.fused(x[:2] + 1), x.compute()
    for arrays in ([part, x], [x, part]):
        expected = [whole[:2] + 1 if each is part else whole for each in arrays]
        np.testing.assert_array_equal(da.concatenate(arrays).compute(), np.concatenate(expected))


def test_an_array_alone(client):
    values, x = array()
    np.testing.assert_array_equal(dask_p2p.fused(x).compute(), values)
    on_workers = client.persist(x)
    both = dask_p2p.fused(on_workers, on_workers)
    for got in dask.compute(*both):
        np.testing.assert_array_equal(got, values)


def test_functions_of_numpy_that_fill_an_array(client):
    """Dask sends the array with each task; the tasks of a rank share one pickle."""
    values, x = array()
    out = np.empty((8, 64))
    filled = [
        x.map_blocks(np.add, 1, out=out, dtype=float),
        x.map_blocks(np.add, 2, out, dtype=float),
        x.map_blocks(partial(np.add, 3, out=out), dtype=float),
    ]
    for number, y in enumerate(dask.compute(*dask_p2p.fused(*filled)), 1):
        np.testing.assert_array_equal(y, values + number)


def test_operators_that_overwrite_blocks_in_use(client):
    values, x = array()
    x = x.persist()
    y = x.T.rechunk((8, 64))
    added = [y.map_blocks(operator.iadd, 1), y * 2, x.map_blocks(operator.iadd, 1), x * 2]
    expected = [values.T + 1, values.T * 2, values + 1, values * 2]
    found = dask.compute(*dask_p2p.fused(*added))
    for each, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(each, wanted)
    np.testing.assert_array_equal(x.compute(), values)


def test_unknown_chunk_sizes(client):
    values, x = array()
    y = dask_p2p.fused(x[x > 0])
    np.testing.assert_array_equal(y.compute(), values[values > 0])


def test_several_ranks_on_a_worker(client):
    _, x = array()
    y = dask_p2p.transpose(x) @ x
    z = dask_p2p.fused(y, ranks=5)
    assert ranks_in(z) == 5
    assert z.compute().tobytes() == y.compute(scheduler="sync").tobytes()


def test_an_exception_arrives_as_itself(client):
    class OwnError(Exception):
        pass

    def failing(block, block_id=None):
        if block_id == (3, 0):
            raise OwnError("no such value")
        return block

    _, x = array()
    y = dask_p2p.fused(x.map_blocks(failing, dtype=float, name="failing-blocks").sum())
    with pytest.raises(OwnError, match="no such value") as caught:
        y.compute()
    assert "In task ('failing-blocks', 3, 0) of a fused graph." in caught.value.__notes__
    del y, caught
    nothing_is_left(client)


class LockedError(Exception):
    def __init__(self):
        super().__init__("no such value")
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [LockedError, StopIteration])
def test_an_exception_that_becomes_another_one_keeps_its_notes(client, kind):
    def failing(block, block_id=None):
        if block_id == (3, 0):
            raise kind
        return block

    _, x = array()
    y = dask_p2p.fused(x.map_blocks(failing, dtype=float, name="failing-blocks").sum())
    with pytest.raises(SectionError, match=f"raised {kind.__name__}") as caught:
        y.compute()
    assert "In task ('failing-blocks', 3, 0) of a fused graph." in caught.value.__notes__


def test_a_value_that_cannot_be_sent_is_named(client):
    _, x = array()
    rows = x.map_blocks(rows_of, drop_axis=1, dtype=float, meta=np.empty(0), name="rows")
    y = da.blockwise(first_rows, "i", rows, "j", x[:, 0], "i", dtype=float)
    with pytest.raises(TypeError, match="pickle") as caught:
        dask_p2p.fused(y.map_blocks(np.negative)).compute()
    assert "In task ('rows', " in caught.value.__notes__[0]


def rows_of(block):
    yield from block


def first_rows(rows, block):
    return block + sum(next(each)[0] for each in rows)


def test_an_exit_ends_no_worker(client):
    def leaving(block):
        raise SystemExit(3)

    _, x = array()
    y = x.map_blocks(leaving, meta=x._meta, name="leaving-blocks")
    with pytest.raises(SectionError, match="SystemExit: 3") as caught:
        dask_p2p.fused(y).compute()
    assert "In task ('leaving-blocks', " in caught.value.__notes__[0]
    assert len(client.nthreads()) == 2


def test_two_gangs_and_other_tasks(client):
    values, x = array()
    others = client.map(lambda i: i + 1, range(20))
    both = [dask_p2p.fused(dask_p2p.transpose(x + number), ranks=4) for number in (1, 2)]
    for number, got in zip((1, 2), dask.compute(*both), strict=True):
        np.testing.assert_array_equal(got, values.T + number)
    assert client.gather(others) == [*range(1, 21)]


def test_a_cancelled_gang_leaves_nothing(client, tmp_path):
    values, x = array()
    x = client.persist(x)
    y = dask_p2p.transpose(x.map_blocks(waiting, tmp_path / "go", meta=x._meta))
    z = dask_p2p.fused(y).persist()
    wait_until(lambda: any(client.processing().values()))
    client.cancel(z)
    (tmp_path / "go").touch()
    del z
    again = dask_p2p.fused(y)
    np.testing.assert_array_equal(again.compute(), values.T)
    del again
    nothing_is_left(client)


def test_progress_is_that_of_supersteps(client):
    _, x = array()
    y = client.persist(dask_p2p.fused(dask_p2p.transpose(x + 1) * 2))
    wait(y)
    run = next(run for run in dask_p2p.last_runs() if run.operation == "p2p-fused")
    assert run.steps == 2
    del y


def test_annotations_apply_to_the_gang(client):
    _, x = array()
    worker = min(client.nthreads())
    z = x + 1
    with dask.annotate(workers=[worker], allow_other_workers=False):
        y = dask_p2p.fused(z, ranks=2)
    y = client.persist(y, optimize_graph=False)
    wait(y, timeout=BOUND_S)
    assert {holder for holders in client.who_has(y).values() for holder in holders} == {worker}


def test_blocks_are_those_of_the_layers(client):
    _, x = array()
    y = (dask_p2p.transpose(x), x.sum(axis=0))
    fused = dask_p2p.fused(*y)
    blocks = {}
    for before, after in zip(y, fused, strict=True):
        keys = [(before.name, *index) for index in np.ndindex(before.numblocks)]
        made = client.get(after.__dask_graph__(), [(after.name, *key[1:]) for key in keys])
        blocks |= dict(zip(keys, made, strict=True))
    check_blocks(y, blocks)


def test_the_same_arrays_have_the_same_name(client):
    _, x = array()
    y = dask_p2p.transpose(x)
    assert dask_p2p.fused(y).name == dask_p2p.fused(y).name
    assert dask_p2p.fused(y).name != dask_p2p.fused(y, ranks=1).name
    assert isinstance(dask_p2p.fused(y).__dask_graph__(), HighLevelGraph)


def inside(ctx, x, steps):
    y = da.from_array(x, chunks=(4, -1))
    fused = dask_p2p.fused(dask_p2p.transpose(y) + steps)
    assert ranks_in(fused) == 1
    return fused.compute(scheduler="sync").T


def test_in_the_function_of_a_section_there_is_one_rank(client):
    values, x = array()
    y = dask_p2p.spmd(inside, x, steps=3)
    np.testing.assert_array_equal(y.compute(), values + 3)


@pytest.mark.parametrize("scheduler", ["sync", "threads", "processes"])
def test_without_a_cluster_there_is_one_rank(scheduler):
    values, x = array()
    y = dask_p2p.fused(x.T + 1, ranks=1)
    np.testing.assert_array_equal(y.compute(scheduler=scheduler), values.T + 1)
