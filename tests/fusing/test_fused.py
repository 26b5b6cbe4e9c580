"""Fused arrays on a cluster of two workers with Dask's default settings."""

import signal
import threading

import dask
import dask.array as da
import numpy as np
import pytest
from dask.highlevelgraph import HighLevelGraph
from distributed import wait
from hypothesis import HealthCheck, given, settings

import dask_p2p
from dask_p2p.config import checked_options
from dask_p2p.engine.task import RankTask
from dask_p2p.errors import InputError, SectionError, UnsupportedArrayError
from dask_p2p.fusing.planning.tasks import keys_of, kind_of, kinds_of, read_graph, tasks_of_layer
from tests.fusing.support import generated, graphs, smoothed, waiting
from tests.sections.emulated import on_gpu
from tests.sections.support import nothing_is_left
from tests.support import BOUND_S, die_once, mostly_slow, result_of
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
    for expected, computed in zip(dask.compute(*arrays), dask.compute(*fused), strict=True):
        assert np.asarray(computed).tobytes() == np.asarray(expected).tobytes()


def test_other_arrays_of_the_same_inputs(client):
    """The inputs of the gang are a part of those of the other array."""
    x = da.map_blocks(generated, (12, 8), 0, chunks=((3, 3, 3, 3), (8,)), dtype=float)
    part, values = dask_p2p.fused(x[:2] + 1), x.compute()
    for arrays in ([part, x], [x, part]):
        expected = [values[:2] + 1 if array is part else values for array in arrays]
        np.testing.assert_array_equal(da.concatenate(arrays).compute(), np.concatenate(expected))


class OwnError(Exception):
    pass


class LockedError(Exception):
    def __init__(self):
        super().__init__("no such value")
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("raised", "error", "words"),
    [
        (OwnError("no such value"), OwnError, "no such value"),
        (LockedError, SectionError, "raised LockedError"),
        (StopIteration, SectionError, "raised StopIteration"),
        (SystemExit, SectionError, "raised SystemExit"),
    ],
    ids=repr,
)
def test_an_exception_arrives_as_itself_if_it_can_and_keeps_its_notes(client, raised, error, words):
    def failing(block, block_id=None):
        if block_id == (3, 0):
            raise raised
        return block

    _, x = array()
    y = dask_p2p.fused(x.map_blocks(failing, dtype=float, name="failing-blocks").sum())
    with pytest.raises(error, match=words) as caught:
        y.compute()
    assert "In task ('failing-blocks', 3, 0) of a fused graph." in caught.value.__notes__
    del y, caught
    nothing_is_left(client)


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
    return block + sum(next(row)[0] for row in rows)


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


def test_annotations_apply_to_the_gang(client):
    _, x = array()
    worker = min(client.nthreads())
    z = x + 1
    with dask.annotate(workers=[worker], allow_other_workers=False):
        y = dask_p2p.fused(z, ranks=2)
    y = client.persist(y, optimize_graph=False)
    wait(y, timeout=BOUND_S)
    assert {holder for holders in client.who_has(y).values() for holder in holders} == {worker}


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


OBJECTS = da.from_array(np.array([1, "a", None], dtype=object), chunks=1)
TEXTS = dask_p2p.rechunk(OBJECTS, 2).astype(str)


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ([], InputError, "at least one Dask array"),
        ([np.ones(3)], UnsupportedArrayError, "from_array"),
        ([OBJECTS], UnsupportedArrayError, r"without Python objects.*astype"),
        ([TEXTS], UnsupportedArrayError, "p2p-rechunk.*without Python objects"),
        ([da.ma.masked_less(da.ones(4, chunks=2), 2)], UnsupportedArrayError, "mask"),
    ],
)
def test_what_is_refused(arrays, error, words):
    with pytest.raises(error, match=words):
        dask_p2p.fused(*arrays)
    with pytest.raises(InputError, match="ranks=0"):
        dask_p2p.fused(da.ones(3), ranks=0)


def test_the_kind_of_blocks(gpu):
    """That of GPUs, if any array of the graph has such blocks."""
    x = on_gpu(gpu, da.ones((4, 4), chunks=2))
    on_host = np.empty((0, 0))
    for y, kind in (
        (x, "cupy"),
        (x.map_blocks(np.copy, meta=on_host), "numpy"),  # nothing shows what it was made of
        (dask_p2p.transpose(x).map_blocks(np.copy, meta=on_host), "cupy"),
        (da.ones((4, 4), chunks=2), "numpy"),
    ):
        layers = [tasks_of_layer(layer, checked_options()) for layer in y.dask.layers.values()]
        tasks = {key: task for layer in layers for key, task in layer.items()}
        assert kind_of(kinds_of([y]), read_graph(tasks, [keys_of(y)])) == kind


@pytest.mark.parametrize(
    "annotations",
    [{"workers": ["alice"]}, {"resources": {"GPU": 1}}, {"retries": 2}, {"priority": 3}],
)
def test_annotations(annotations):
    with dask.annotate(**annotations):
        x = da.ones((8, 8), chunks=(2, 8)) + 1
    with pytest.raises(
        UnsupportedArrayError, match=f"is annotated with {next(iter(annotations))}="
    ):
        dask_p2p.fused(x * 2)
    with dask.annotate(colour="red"):
        x = da.ones((8, 8), chunks=(2, 8)) + 1
    assert dask_p2p.fused(x).compute(scheduler="sync").sum() == 128


def test_annotations_of_tasks_that_stay_with_dask():
    def read(block_info=None):
        return np.ones(block_info[None]["chunk-shape"])

    with dask.annotate(retries=2):
        x = da.map_blocks(read, chunks=((2, 2), (8,)), dtype=float)
    y = dask_p2p.fused(x + 1)
    layers = y.__dask_graph__().layers.values()
    assert {tuple((layer.annotations or {}).items()) for layer in layers} == {(), (("retries", 2),)}
    assert y.compute(scheduler="sync").sum() == 64


def killed_once(block, path):
    """Kill this worker once, when a rank has the block."""
    die_once(path)
    return block


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 6])
def test_a_killed_worker_brings_all_ranks_again(client, tmp_path, steps):
    client.wait_for_workers(2)
    x = client.persist(da.random.default_rng(0).normal(size=(32, 16), chunks=(4, 16)))
    wait(x)
    expected, y = smoothed(x, 8), smoothed(x, steps)
    y = smoothed(y.map_blocks(killed_once, tmp_path / "killed", meta=y._meta), 8 - steps)
    future = client.compute(dask_p2p.fused(dask_p2p.transpose(y)))
    assert result_of(client, future).tobytes() == expected.compute().T.copy().tobytes()
    assert (tmp_path / "killed").exists()
    del future, x, y, expected
    nothing_is_left(client)


@pytest.mark.parametrize("by_option", [False, True])
def test_an_output_that_is_lost_is_made_again(client, by_option):
    client.wait_for_workers(2)
    x = da.random.default_rng(0).normal(size=(32, 16), chunks=(4, 16))
    y = smoothed(x, 8)
    expected = y.compute()
    with dask.config.set({"p2p.fuse": "on" if by_option else "off"}):
        y = client.persist(y if by_option else dask_p2p.fused(y))
    wait(y)
    for _ in range(2):
        victim = next(iter(client.who_has(y).values()))[0]
        client.run(signal.raise_signal, signal.SIGKILL, workers=[victim], on_error="ignore")
        assert result_of(client, client.compute(y)).tobytes() == expected.tobytes()
    del y
    nothing_is_left(client)


def by_dask(x, chunks):
    """Return the array in other chunks, by Dask's own peer-to-peer rechunk."""
    y = x.rechunk(chunks, method="p2p")
    assert type(y.__dask_graph__().layers[y.name]).__name__ == "P2PRechunkLayer"
    return y


@pytest.mark.parametrize("dtype", ["f8", "c8", "?", "M8[s]", "S3", ">i4"])
@pytest.mark.parametrize("chunks", mostly_slow([(12, 2), (5, 7), (6, -1)], [(5, 7)]))
def test_rechunks_are_done_by_ranks(client, dtype, chunks):
    values = np.arange(96).reshape(12, 8).astype(dtype)
    x = da.from_array(values, chunks=(3, 8)).map_blocks(np.copy, dtype=dtype)
    y = dask_p2p.fused(by_dask(x, chunks))
    computed = y.compute()
    assert computed.dtype == y.dtype == values.dtype
    np.testing.assert_array_equal(computed, values)


def masked(block):
    return np.ma.masked_less(block, 0.5)


def texts(block):
    return np.where(block > 0.5, block.astype(object), None)


STAYS = {
    "masked": lambda x: da.ma.filled(
        by_dask(x.map_blocks(masked, meta=np.ma.empty((0, 0))), {1: 5}), -1
    ),
    "objects": lambda x: by_dask(x.map_blocks(texts, dtype=object), {1: 5}).astype(float),
    "of unknown chunk sizes": lambda x: by_dask(x[x[:, 0] > 0.5], {1: 5}),
}


@pytest.mark.parametrize("name", mostly_slow(STAYS, ["masked"]))
def test_other_rechunks_stay_with_dask(client, name):
    values = np.random.default_rng(0).random((12, 8))
    y = STAYS[name](da.from_array(values, chunks=(2, 8))) + 1
    np.testing.assert_array_equal(dask_p2p.fused(y).compute(), y.compute())


def of_several_dtypes(block, block_id=None):
    return block.astype(("f8", "f4", "i2")[block_id[0] % 3])


@pytest.mark.parametrize("function", [masked, of_several_dtypes])
def test_blocks_unlike_their_declaration(client, function):
    """Dask computes them with `auto`; otherwise an error names the block."""
    values = np.random.default_rng(0).random((64, 8))
    x = da.from_array(values, chunks=(2, 8)).map_blocks(function, meta=np.empty((0, 0)))
    y = by_dask(by_dask(by_dask(x, (32, 2)) + 1, (16, 4)) + 1, (5, 7))
    expected = y.compute()
    with pytest.raises(InputError, match="block"):
        dask_p2p.fused(y).compute()
    with dask.config.set({"p2p.fuse": "auto"}):
        assert dask_p2p.explain(y).startswith("by one gang")
        computed = y.compute()
    assert computed.dtype == expected.dtype
    np.testing.assert_array_equal(computed, expected)


def test_a_rechunk_before_a_task_that_stays_with_dask(client):
    values = np.arange(64.0).reshape(8, 8)
    x = by_dask(da.from_array(values, chunks=(2, 8)) + 1, (8, 2))
    y = x.map_blocks(np.multiply, client.submit(float, 3), dtype=float)
    np.testing.assert_array_equal(dask_p2p.fused(y).compute(), (values + 1) * 3)
