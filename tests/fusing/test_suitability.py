"""Graphs that ranks can share, operations of Dask's own in them, and what they keep in memory."""

import os
import signal
from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from distributed import Client, LocalCluster, get_worker, wait

import dask_p2p
from dask_p2p.errors import MemoryLimitError, UnsupportedArrayError
from dask_p2p.fusing.planning.planner import programs_of
from dask_p2p.fusing.suitability import Cluster, check_count, check_suitable, ranks_for
from tests.fusing import support
from tests.fusing.support import integers, smoothed, tasks_and_sizes
from tests.sections.support import nothing_is_left
from tests.support import tune

CLUSTER_OF_4 = Cluster(workers=4, threads=8, memory_bytes=2**30, has_resources=False)


def array(n=64, rows=8):
    return da.from_array(np.ones((n, n)), chunks=(rows, n))


def check(x, size=4, cluster=CLUSTER_OF_4, kind="numpy"):
    tasks, sizes = tasks_and_sizes(x)
    check_suitable(tasks, programs_of(tasks, size, sizes), sizes, cluster, kind)


def test_few_tasks():
    with pytest.raises(
        UnsupportedArrayError, match=r"and no tasks besides the 8 outputs \(4 for each of 4 r"
    ):
        check(array() + 1)
    with pytest.raises(
        UnsupportedArrayError, match=r": 1 exchange .* and about 1 task besides the 4 outputs"
    ):
        check(smoothed(array(rows=16), 1))
    check(smoothed(array(rows=16), 3))


def test_memory_of_gpus():
    """The memory limit of a worker is that of its host memory."""
    cluster = Cluster(4, 4, 2**13, has_resources=False, device_bytes=2**30)
    check(smoothed(array(), 6), 4, cluster, "cupy")
    check(smoothed(array(), 6), 4, replace(cluster, device_bytes=0), "cupy")
    small = replace(cluster, memory_bytes=0, device_bytes=2**13)
    with pytest.raises(
        UnsupportedArrayError, match=r"at most 4.00 kiB in the memory of a worker's GPU, 8.00"
    ):
        check(smoothed(array(), 6), 4, small, "cupy")


def test_balance():
    x = dask_p2p.rechunk(array(256, 16), (256, 256))  # one block
    for _ in range(30):
        x = x * 2 + x.sum()
    with pytest.raises(UnsupportedArrayError, match="about the same work for all ranks"):
        check(x)


def test_very_many_tasks(monkeypatch):
    tasks = support.read_arrays(smoothed(array(), 6))[1]
    check_count(tasks)
    tune(monkeypatch, fused_tasks=40)
    with pytest.raises(UnsupportedArrayError, match="at most 40 tasks, got"):
        check_count(tasks)


def test_ranks():
    def ranks(x, cluster=CLUSTER_OF_4):
        return ranks_for(*tasks_and_sizes(x), cluster)

    assert ranks(smoothed(array(), 6)) == 4
    assert ranks(smoothed(array(rows=32), 6)) == 2
    assert ranks(smoothed(array(2048, 64), 6)) == 8
    assert ranks(smoothed(array(), 6), Cluster(0, 0, 0, has_resources=False)) == 1


N = 24


def position(block, block_info=None, block_id=None):
    """Return a block with its place in the array added."""
    start = block_info[0]["array-location"][0][0]
    return block + start + 100 * block_id[1]


def stars(x):
    """Overlaps without corners, of dtypes whose unread value is no float."""
    options = {"depth": 1, "boundary": "periodic", "corners": False}
    neighbours = [
        dask_p2p.map_overlap(np.copy, x.astype("i4").astype(dtype), **options, dtype=dtype)
        for dtype in ("i4", "?", "M8[s]")
    ]
    return da.stack([y.astype(float) for y in neighbours])


def assigned(x):
    y = x.copy()
    y[3:9, ::2] = 7
    y[x > 1] = -1
    return y


def by_xarray(x):
    a = xr.DataArray(x, dims=("time", "place"), coords={"time": np.arange(N) % 4})
    means = a.groupby("time").mean()
    return (a.groupby("time") - means).rolling(place=3).mean().data


OPERATIONS = {
    "stars": stars,
    "matrix product": lambda x: integers(x) @ integers(x).T,
    "einsum": lambda x: da.einsum("ij,jk->ik", integers(x), integers(x).T),
    "qr": lambda x: da.linalg.qr(x.rechunk((6, -1)))[1],
    "cholesky": lambda x: da.linalg.cholesky((x @ x.T + N * da.eye(N, chunks=8)).rechunk((8, 8))),
    "histogram": lambda x: da.histogram(x, bins=5, range=(-3, 3))[0],
    "median": lambda x: da.median(x, axis=0),
    "unique": lambda x: da.unique((x * 2).round().astype(int)),
    "standard deviation": lambda x: x.std(axis=0, keepdims=True) + x.var(),
    "cumulative sum by trees": lambda x: da.cumsum(x, axis=0, method="blelloch"),
    "reshape": lambda x: x.reshape(4, -1, N),
    "pad": lambda x: da.pad(x, 2, mode="reflect"),
    "block": lambda x: da.block([[x, x + 1], [x * 2, x]]),
    "stack": lambda x: da.stack([x, x.T], axis=1),
    "take": lambda x: x[[5, 1, 20, 1]][:, [0, 3]],
    "vectorized index": lambda x: x.vindex[[1, 9, 20], [3, 3, 0]],
    "mask": lambda x: x[x > 0],
    "masked rows": lambda x: x[x[:, 0] > 0].sum(axis=0),
    "assignment": assigned,
    "gradient": lambda x: da.gradient(x, axis=0),
    "apply along an axis": lambda x: da.apply_along_axis(np.sort, 0, x),
    "searchsorted": lambda x: da.searchsorted(da.linspace(-2, 2, 9, chunks=4), x[0]),
    "blocks with their place": lambda x: x.map_blocks(position, dtype=float),
    "overlap of Dask": lambda x: x.map_overlap(np.sort, depth=2, boundary="reflect", dtype=float),
    "sliding windows": lambda x: da.lib.stride_tricks.sliding_window_view(x, 3, axis=0).mean(-1),
    "fft": lambda x: da.fft.fft2(x.rechunk(-1)),
    "real part": lambda x: (x * 1j).conj().imag,
    "structures": lambda x: x.astype([("a", "f8"), ("b", "i4")])["b"],
    "text": lambda x: x.round(2).astype("U8"),
    "a delayed number": lambda x: x + da.from_delayed(dask.delayed(float)(3), (), float),
    "random numbers": lambda x: x + da.random.default_rng(3).normal(size=(N, N), chunks=8),
    "xarray": by_xarray,
    "tokens of one name": lambda x: da.concatenate([x[:3], x[3:]]) - x,
}

BY_BLAS = ("qr", "cholesky")  # the order of additions depends on addresses


@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_dask(name, size):
    values = np.random.default_rng(0).normal(size=(N, N))
    x = da.from_array(values, chunks=(5, 9)) * 1.0
    result = OPERATIONS[name](x)
    arrays = [result, result + 1] if result.dtype.kind in "if" else [result]
    blocks = support.run_programs(arrays, size)
    support.check_blocks(arrays, blocks, atol=1e-9 if name in BY_BLAS else 0.0)


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


def larger_than_declared(x):
    """Return an array of blocks that grow, wait for a number of all, and shrink."""
    y = exchanged(x).map_blocks(np.repeat, 64, axis=0, dtype=float)
    largest = y.map_blocks(lambda block: block[:1, :1], dtype=float, chunks=(1, 1)).max()
    y = y.map_blocks(np.add, largest, dtype=float)
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


@pytest.mark.slow
@pytest.mark.parametrize("program", [larger_than_declared, larger_inputs])
def test_dask_computes_graphs_of_larger_blocks(small_workers, program, caplog):

    def known_ranks(dask_scheduler):
        return [key for key in dask_scheduler.tasks if "p2p-fused-ranks" in str(key)]

    client, x = small_workers, source()
    expected = program(x).compute(scheduler="sync")
    workers = {*client.scheduler_info(n_workers=-1)["workers"]}
    with dask.config.set({"p2p.fuse": "auto"}):
        assert dask_p2p.explain(program(x)).startswith("by one gang")
        caplog.set_level("INFO", "dask_p2p")
        for number in range(2):
            y = client.persist(program(x))
            wait(y)
            assert not client.run_on_scheduler(known_ranks)
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


def test_an_error_names_what_is_larger(small_workers):
    y = exchanged(source(512, 64)).map_blocks(np.repeat, 2**10, axis=0, dtype=float)
    y = y.map_blocks(np.subtract, y.sum(), dtype=float).map_blocks(shrunk, dtype=float)
    for total, mode in ((dask_p2p.fused(y.sum()), "off"), (y.sum(), "on")):
        with (
            dask.config.set({"p2p.fuse": mode}),
            pytest.raises(MemoryLimitError, match=r"as its arrays declare, .* map_blocks\(chunks="),
        ):
            total.compute()
