from __future__ import annotations

import asyncio
import doctest
import inspect
from types import SimpleNamespace

import dask
import dask.array as da
import distributed.shuffle
import numpy as np
import pytest
from dask.array.utils import assert_eq
from distributed import Client, Scheduler, Worker
from distributed.shuffle._rechunk import rechunk_p2p

import dask_p2p
from dask_p2p import dropin
from dask_p2p.errors import ConfigError
from tests.support import persisted, used

#: From eight slabs on Dask chooses p2p by itself where there is a client.
X = np.arange(64 * 48.0).reshape(64, 48)
SLABS = (8, -1)


@pytest.fixture(autouse=True)
def _as_before():
    yield
    dask_p2p.uninstall()
    assert distributed.shuffle.rechunk_p2p is rechunk_p2p


@pytest.fixture
def x():
    return da.from_array(X, chunks=SLABS)


def is_ours(y):
    return any(name.startswith("p2p-") for name in y.dask.layers)


def is_dasks(y):
    return any(name.startswith("rechunk-p2p-") for name in y.dask.layers)


def test_examples_in_docstrings():
    assert doctest.testmod(dropin).failed == 0


def test_what_is_replaced_has_the_same_parameters():
    """Another Dask may call it otherwise."""
    stock = inspect.signature(rechunk_p2p)
    assert [*stock.parameters][:2] == [*inspect.signature(dropin._rechunked).parameters][:2]
    assert all(p.kind is p.KEYWORD_ONLY for p in [*stock.parameters.values()][2:])


def test_code_that_exists_uses_this_package(client, x):
    xarray = pytest.importorskip("xarray")
    x = persisted(client, x)
    named = xarray.DataArray(x, dims=("a", "b"))
    operations = {
        "rechunk": lambda: x.rechunk({0: -1, 1: 6}),
        "function": lambda: da.rechunk(x, (-1, 6)),
        "transposed": lambda: x.T.rechunk((6, -1)),
        "xarray": lambda: named.chunk({"a": -1, "b": 6}).data,
    }
    for name, operation in operations.items():
        stock = operation()
        with dask_p2p.install():
            y = operation()
        assert is_dasks(stock), name
        assert is_ours(y), name
        assert not is_dasks(y), name
        assert y.chunks == stock.chunks, name
        assert (y.dtype, type(y._meta)) == (stock.dtype, type(stock._meta)), name
        y = persisted(client, y)
        np.testing.assert_array_equal(y.compute(), X.T if name == "transposed" else X, name)
        assert used(client, y), name


def test_what_dask_does_by_tasks_it_still_does(client, x):
    with dask_p2p.install():
        for y in (x.rechunk((-1, 6), method="tasks"), x.rechunk((16, -1))):
            assert not is_ours(y)
            assert not is_dasks(y)
    with dask.config.set({"array.rechunk.method": "tasks"}), dask_p2p.install():
        assert not is_ours(x.rechunk((-1, 6)))


def test_without_a_client(x):
    with dask_p2p.install():
        assert not is_ours(x.rechunk((-1, 6)))
        y = x.rechunk((-1, 6), method="p2p")
    assert is_ours(y)
    assert_eq(y, X, scheduler="threads")


@pytest.mark.parametrize("dtype", [">f8", "M8[s]", "O", [("a", "i2"), ("b", "f4")]], ids=str)
def test_keeps_dtypes(client, dtype):
    values = np.arange(64).reshape(8, 8).astype("i8").astype(dtype)
    with dask_p2p.install():
        y = da.from_array(values, chunks=(1, 8)).rechunk((8, 1))
    assert is_ours(y)
    assert y.dtype == values.dtype
    result = y.compute()
    assert result.dtype == values.dtype
    np.testing.assert_array_equal(result, values)


def test_arrays_that_it_does_not_take_go_dasks_way(x):
    masked = da.ma.masked_greater(x, 100)
    unknown = x[x[:, 0] > 1000]
    with dask_p2p.install():
        for y in (masked, unknown):
            assert is_dasks(y.rechunk({1: 6}, method="p2p"))


def test_blocks_of_another_library_of_unknown_sizes(x):
    """They go by tasks: Dask's own way fails with blocks on GPUs."""
    unknown = x[x[:, 0] > 1000]
    with dask_p2p.install(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropin, "np", SimpleNamespace(ndarray=()))  # of which nothing is one
        y = unknown.rechunk({1: 6}, method="p2p")
    assert not is_dasks(y)
    np.testing.assert_array_equal(y.compute(scheduler="sync"), X[X[:, 0] > 1000])


def test_installing_twice_and_taking_it_off(x):
    dask_p2p.install()
    with dask_p2p.install():  # changes nothing, and so takes nothing off
        pass
    dask_p2p.install()
    assert is_ours(x.rechunk((-1, 6), method="p2p"))
    dask_p2p.uninstall()
    assert distributed.shuffle.rechunk_p2p is rechunk_p2p
    dask_p2p.uninstall()
    with pytest.raises(KeyError), dask_p2p.install():
        raise KeyError
    assert distributed.shuffle.rechunk_p2p is rechunk_p2p


def test_others_replace_the_same_function(x):
    seen = []
    with pytest.MonkeyPatch.context() as patch:

        def before(*args, **kwargs):
            seen.append("before")
            return rechunk_p2p(*args, **kwargs)

        patch.setattr(distributed.shuffle, "rechunk_p2p", before)
        dask_p2p.install()
        ours = distributed.shuffle.rechunk_p2p

        def after(*args, **kwargs):
            seen.append("after")
            return ours(*args, **kwargs)

        patch.setattr(distributed.shuffle, "rechunk_p2p", after)
        assert is_ours(x.rechunk((-1, 6), method="p2p"))
        dask_p2p.uninstall()
        assert distributed.shuffle.rechunk_p2p is after
        assert is_dasks(x.rechunk((-1, 6), method="p2p"))
    assert seen == ["after", "after", "before"]


def test_beside_an_optimiser_of_all_arrays(client, x):
    seen = []

    def optimise(graph, keys, **kwargs):
        seen.append(list(graph.layers))
        return da.optimize(graph, keys, **kwargs)

    with dask.config.set(array_optimize=optimise), dask_p2p.install():
        y = x.rechunk((-1, 6)) + 1
        (best,) = dask.optimize(y)
    assert is_ours(y)
    assert any(name.startswith("p2p-rechunk-") for name in seen[0])
    np.testing.assert_array_equal(best.compute(), X + 1)


def test_downstream_of_dasks_own_functions(client):
    """What Dask rechunks within."""
    values = np.random.default_rng(0).random((16, 16))
    x = da.from_array(values, chunks=(2, -1))
    with dask_p2p.install():
        y = da.fft.fft(x.rechunk((-1, 2)), axis=0)
        z = x[:, ::-1].rechunk((-1, 2)).sum(axis=0)[3:5]
    assert is_ours(y)
    assert is_ours(z)
    np.testing.assert_array_equal(y.compute(), np.fft.fft(values, axis=0))
    np.testing.assert_allclose(z.compute(), values[:, ::-1].sum(axis=0)[3:5])


@pytest.mark.parametrize("wanted", [True, False])
def test_by_preload_in_a_client(cluster, x, wanted):
    preloads = {"distributed.client.preload": ["dask_p2p.preload"], "p2p.install": wanted}
    with dask.config.set(preloads), Client(cluster):
        assert is_ours(x.rechunk((-1, 6))) is wanted
    assert is_ours(x.rechunk((-1, 6), method="p2p")) is wanted


def test_by_preload_on_a_worker():
    """Its tasks may make arrays."""

    async def run():
        nothing = {"dashboard_address": ":0", "preload": ["dask_p2p.preload"]}
        async with Scheduler(**nothing) as scheduler:
            assert distributed.shuffle.rechunk_p2p is rechunk_p2p
            async with Worker(scheduler.address, **nothing):
                assert distributed.shuffle.rechunk_p2p is not rechunk_p2p

    with dask.config.set({"p2p.install": True}):
        asyncio.run(run())


def test_an_option_that_is_neither_yes_nor_no():
    from dask_p2p.config import installs_with_preload

    with (
        dask.config.set({"p2p.install": "of course"}),
        pytest.raises(ConfigError, match=r"p2p.install is 'of course': expected true or false"),
    ):
        installs_with_preload()
