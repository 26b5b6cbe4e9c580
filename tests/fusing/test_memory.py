"""Fused graphs whose values are larger than their arrays declare, at Dask's default settings."""

from __future__ import annotations

import os
import signal

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, get_worker, wait

import dask_p2p
from dask_p2p.errors import MemoryLimitError
from tests.sections.support import nothing_is_left

LIMIT_BYTES = 2**28  # ranks may take 5 % of it: Dask's own processes have the others


@pytest.fixture
def small_workers():
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=LIMIT_BYTES, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def grown(block):
    return np.repeat(block, 64, axis=0)


def shrunk(block):
    return block[::64] * 1.0


def exchanged(x):
    """Return an array of several exchanges."""
    for _ in range(3):
        x = dask_p2p.transpose(dask_p2p.transpose(x) + 1, chunks=x.chunks)
    return x


def source(rows=2048, columns=64):
    values = np.random.default_rng(0).integers(0, 99, (rows, columns)).astype(float)
    return da.from_array(values, chunks=(rows // 32, columns))


def largest(x):
    """Return the largest first element of all blocks."""
    return x.map_blocks(lambda block: block[:1, :1], dtype=float, chunks=(1, 1)).max()


def larger_than_declared(x):
    """Return an array of blocks that grow, wait for a number of all, and shrink."""
    y = exchanged(x).map_blocks(grown, dtype=float)
    y = y.map_blocks(np.add, largest(y), dtype=float)
    return y.map_blocks(shrunk, dtype=float)


def larger_inputs(x):
    """Return an array of blocks that functions without arrays make: they are inputs of a gang."""
    blocks = da.map_blocks(
        lambda block_info=None: np.ones((2**12, 64)) * block_info[None]["chunk-location"][0],
        chunks=x.chunks,
        dtype=float,
    )
    ends = blocks.map_blocks(lambda b: b[:64, :64] * 1.0, dtype=float, chunks=x.chunks)
    return exchanged(ends + x)


def no_rank_is_known(dask_scheduler):
    return not [key for key in dask_scheduler.tasks if "p2p-fused-ranks" in str(key)]


@pytest.mark.slow
@pytest.mark.parametrize("program", [larger_than_declared, larger_inputs])
def test_dask_computes_graphs_of_larger_blocks(small_workers, program, caplog):
    client, x = small_workers, source()
    expected = program(x).compute(scheduler="sync")
    workers = {*client.scheduler_info(n_workers=-1)["workers"]}
    with dask.config.set({"p2p.fuse": "auto"}):
        assert dask_p2p.explain(program(x)).startswith("by one gang")
        caplog.set_level("INFO", "dask_p2p")
        for number in range(2):
            y = client.persist(program(x))
            wait(y)
            assert client.run_on_scheduler(no_rank_is_known)
            np.testing.assert_array_equal(y.compute(), expected)
            del y
            nothing_is_left(client)
            texts = [record.message for record in caplog.records if "in place of" in record.message]
            assert len(texts) == 1, f"the graph is fused once, not {number + 1} times"
    assert {*client.scheduler_info(n_workers=-1)["workers"]} == workers, "none was killed"


def test_blocks_as_declared_are_fused(small_workers, caplog):
    caplog.set_level("INFO", "dask_p2p")
    y = exchanged(source())
    with dask.config.set({"p2p.fuse": "auto"}):
        np.testing.assert_array_equal(y.compute(), y.compute(scheduler="sync"))
    assert not [record for record in caplog.records if "in place of" in record.message]


def killed_in_a_gang(block, path):
    """Kill the worker where a rank has the block, as its nanny does when the memory is full."""
    if "p2p-fused" in str(get_worker().get_current_task()):
        path.mkdir()  # once
        os.kill(os.getpid(), signal.SIGKILL)
    return block


@pytest.mark.slow
def test_a_graph_that_has_killed_a_worker_is_left_to_dask(small_workers, tmp_path):
    client, x = small_workers, source(64, 16)
    y = exchanged(x)
    z = exchanged(y.map_blocks(killed_in_a_gang, tmp_path / "killed", dtype=float))
    expected = exchanged(y).compute(scheduler="sync")
    with dask.config.set({"p2p.fuse": "auto"}):
        for _ in range(2):
            future = client.compute(z)
            np.testing.assert_array_equal(future.result(timeout=60), expected)
            del future


def large(block):
    return np.repeat(block, 2**10, axis=0) + 0.0


def test_an_error_names_what_is_larger(small_workers):
    x = source(512, 64)
    y = exchanged(x).map_blocks(large, dtype=float)
    y = y.map_blocks(np.subtract, y.sum(), dtype=float).map_blocks(shrunk, dtype=float)
    for total, mode in ((dask_p2p.fused(y.sum()), "off"), (y.sum(), "on")):
        with (
            dask.config.set({"p2p.fuse": mode}),
            pytest.raises(MemoryLimitError, match=r"as its arrays declare, .* map_blocks\(chunks="),
        ):
            total.compute()
