"""Stores of Dask arrays to Zarr under `install`: each task writes whole shards, or chunks."""

from itertools import count

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.errors import InputError

zarr = pytest.importorskip("zarr")

VALUES = np.arange(60 * 48.0).reshape(60, 48) + 1
SHARDS = {"chunks": (4, 5), "shards": (20, 20)}


def check_units(lazy, target, region=(slice(None), slice(None))):
    """Check that no two tasks write to one unit: `lazy` has a block for each task."""
    units = target.shards or target.chunks
    for sizes, unit, length, part in zip(lazy.chunks, units, target.shape, region, strict=True):
        rows = range(length)[part]
        for bound in np.cumsum(sizes)[:-1]:
            assert rows[bound] // unit > rows[bound - 1] // unit


@pytest.fixture
def new(tmp_path):
    numbers = count()
    return lambda: tmp_path / f"{next(numbers)}.zarr"


@pytest.fixture(autouse=True)
def _installed():
    with dask_p2p.install():
        yield
    assert da.store is da.core.store
    assert da.to_zarr is da.core.to_zarr


def arrays():
    x = da.from_array(VALUES, chunks=(5, 48))
    yield dask_p2p.transpose(x, chunks=(4, 10)), VALUES.T
    yield dask_p2p.rechunk(x, (7, 9)), VALUES
    yield dask_p2p.map_overlap(lambda block: block, x, depth=1, boundary=0.0), VALUES
    yield da.from_array(VALUES, chunks=((3, 7, 20, 30), (11, 9, 28))), VALUES


def created(path, shape, **options):
    return zarr.create_array(path, shape=shape, dtype="f8", fill_value=0, **options)


def check(path, values):
    np.testing.assert_array_equal(zarr.open_array(path, mode="r")[...], values)


@pytest.mark.parametrize(
    "options", [{"chunks": (16, 16)}, SHARDS, {"chunks": (13, 13), "zarr_format": 2}, {}]
)
def test_new_arrays(new, options):
    for x, values in arrays():
        lazy = da.to_zarr(x, path := new(), compute=False, **options)
        check_units(lazy, zarr.open_array(path))
        dask.compute(lazy)
        check(path, values)


@pytest.mark.parametrize("options", [{"chunks": (16, 16)}, SHARDS])
@pytest.mark.parametrize("step", [1, 3])
def test_regions_of_existing_arrays(new, options, step):
    for x, values in arrays():
        target = created(path := new(), (200, 100), **options)
        region = np.s_[3 : 3 + step * x.shape[0] : step, 7 : 7 + x.shape[1]]
        lazy = da.store(x, target, regions=region, lock=False, compute=False)
        check_units(lazy, target, region)
        dask.compute(lazy)
        want = np.zeros(target.shape)
        want[region] = values
        check(path, want)


def test_results_of_iterate_and_fused_graphs(client, new):
    x = da.from_array(VALUES, chunks=(5, 48))
    results = [dask_p2p.iterate(lambda u: u[1:-1] + 1, x, {0: 1}, 2, boundary=0.0)]
    with dask.config.set({"p2p.fuse": "on"}):
        results.append(dask_p2p.rechunk(x + 2, (7, 9)))
        for result in results:
            da.to_zarr(result, path := new(), chunks=(16, 16))
            check(path, VALUES + 2)
            da.to_zarr(result, path := new(), **SHARDS)
            check(path, VALUES + 2)


def test_two_arrays_in_one_store_call(client, new):
    """They write to one unit in turn where both have a part of it."""
    x = da.from_array(VALUES, chunks=(7, 9))
    first, second = new(), new()
    targets = [created(first, (60, 48), **SHARDS), created(second, (60, 48), chunks=(16, 16))]
    da.store([x, x + 1], targets, lock=False)
    check(first, VALUES)
    check(second, VALUES + 1)
    target = created(path := new(), (120, 48), chunks=(16, 16))
    regions = [np.s_[:60, :], np.s_[60:, :]]
    da.store([x, x + 1], [target, zarr.open_array(path)], lock=False, regions=regions)
    check(path, np.concatenate([VALUES, VALUES + 1]))


def test_one_exchange_and_none_for_blocks_that_fit(new):
    def layers(x, **options):
        lazy = da.to_zarr(x, new(), compute=False, **options)
        return [name for name in lazy.dask.layers if name.startswith(("p2p", "rechunk"))]

    x = da.from_array(VALUES, chunks=(20, 24))
    assert not layers(x)
    assert not layers(x, chunks=(5, 12))
    assert not layers(x, chunks=(5, 6), shards=(10, 12))
    assert len(layers(x, chunks=(16, 24))) == 1
    uneven = da.from_array(VALUES, chunks=((3, 7, 20, 30), (48,)))
    assert len(layers(uneven)) == len(layers(uneven, chunks=(16, 16))) == 1


def test_results_that_are_kept_and_lazy_calls(new):
    x = da.from_array(VALUES, chunks=(7, 9))
    target = created(path := new(), x.shape, chunks=(16, 16))
    stored = x.store(target, lock=False, return_stored=True)
    np.testing.assert_array_equal(stored, VALUES)
    lazy = da.to_zarr(x, path := new(), chunks=(16, 16), compute=False)
    assert not zarr.open_array(path)[...].any()
    dask.compute(lazy)
    check(path, VALUES)


def test_kinds_of_arrays(new):
    for x in (
        da.zeros((), chunks=()),
        da.zeros((0, 4), chunks=(1, 2)),
        da.arange(20, chunks=3, dtype="i2"),
        da.arange(20, chunks=3).astype("M8[s]"),
        da.from_array(np.array([(1, 2.0)] * 20, dtype="i4,f8"), chunks=3),
    ):
        options = {"chunks": (4,)} if x.ndim == 1 else {}
        da.to_zarr(x, path := new(), zarr_format=2, **options)
        np.testing.assert_array_equal(zarr.open_array(path)[...], x)


def test_masked_blocks_are_rechunked_by_dask(new):
    x = da.ma.masked_less(da.from_array(VALUES, chunks=(7, 9)), 0)
    da.to_zarr(x, path := new(), chunks=(16, 16))
    check(path, VALUES)


def test_unknown_chunks_are_named(new):
    x = da.from_array(VALUES, chunks=(7, 9))
    x = x[x[:, 0] > 9]
    target = created(path := new(), VALUES.shape, chunks=(16, 16))
    with pytest.raises(InputError, match="compute_chunk_sizes"):
        da.store(x, target)
    assert not zarr.open_array(path)[...].any()


def test_other_targets_and_errors_are_dasks(new):
    x = da.from_array(VALUES, chunks=(7, 9))
    target = np.zeros_like(VALUES)
    with dask.config.set(scheduler="threads"):
        x.store(target)
    np.testing.assert_array_equal(target, VALUES)
    with pytest.raises(ValueError, match="Different number"):
        da.store([x, x], [target])
    with pytest.raises(ValueError, match="do not add up"):
        da.to_zarr(x, created(new(), (64, 64), chunks=(16, 16)))


def test_methods_of_xarray(new):
    xr = pytest.importorskip("xarray")
    for x, values in arrays():
        a = xr.DataArray(x, dims=("i", "j"), name="a")
        for data in (a, a.to_dataset()):
            options = {"consolidated": False, "zarr_format": 3, "encoding": {"a": SHARDS}}
            data.to_zarr(path := new(), **options)
            check(path / "a", values)
            data.to_zarr(path, append_dim="i", consolidated=False)
            check(path / "a", np.concatenate([values, values]))
    with pytest.raises(ValueError, match="would overlap"):
        a[:3].to_zarr(path, region={"i": slice(0, 3)}, consolidated=False)


def test_arrays_of_dask_array(new, dask_array):
    target = created(path := new(), VALUES.shape, chunks=(16, 16))
    lazy = dask_array.store(
        dask_array.from_array(VALUES, chunks=(7, 9)) + 0, target, lock=False, compute=False
    )
    assert any(str(key[0]).startswith("p2p-rechunk") for key in lazy.__dask_graph__())
    dask.compute(lazy)
    check(path, VALUES)
