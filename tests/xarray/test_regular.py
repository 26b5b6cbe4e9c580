"""`to_zarr`: stores of arrays whose blocks have several sizes."""

from __future__ import annotations

import re

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import dask_p2p.xarray  # noqa: F401
from dask_p2p.errors import InputError

pytest.importorskip("zarr")
VALUES = np.arange(70.0).reshape(10, 7)
UNEVEN = ((3, 3, 2, 2), (2, 5))


def array(chunks=UNEVEN, **encoding):
    a = xr.DataArray(da.from_array(VALUES, chunks), dims=("x", "y"), name="a", attrs={"units": "m"})
    a.encoding = encoding
    return a


def written(data, path, **options):
    data.p2p.to_zarr(path, consolidated=False, **options)
    return xr.open_zarr(path, consolidated=False)


def test_chunks_by_dimension(tmp_path):
    assert written(array(), tmp_path / "a.zarr", chunks={"x": 5}).a.chunks[0] == (5, 5)
    assert written(array(), tmp_path / "b.zarr", chunks=-1).a.chunks == ((10,), (7,))
    assert written(array(), tmp_path / "c.zarr", chunks={"y": "auto"}).a.chunks[1] == (7,)
    memory = xr.DataArray(VALUES, dims=("x", "y"), name="a")
    assert written(memory, tmp_path / "d.zarr", chunks={"x": 4}).a.chunks == ((4, 4, 2), (7,))
    assert written(memory, tmp_path / "e.zarr").a.shape == (10, 7)


def test_chunks_that_zarr_has_not(tmp_path):
    with pytest.raises(InputError, match=r"'a'.*one size along 'x'.*\(4, 6\).*chunks=\{'x': 6\}"):
        array().p2p.to_zarr(tmp_path / "a.zarr", chunks={"x": (4, 6)})
    memory = xr.DataArray(VALUES, dims=("x", "y"), name="a")
    with pytest.raises(InputError, match="one size along 'x'"):
        memory.p2p.to_zarr(tmp_path / "a.zarr", chunks={"x": (4, 6)})
    with pytest.raises(InputError, match="'z' is no dimension"):
        array().p2p.to_zarr(tmp_path / "a.zarr", chunks={"z": 3})
    unknown = array().data[array().data[:, 0] > 8]
    with pytest.raises(InputError, match="compute_chunk_sizes"):
        xr.DataArray(unknown, dims=("x", "y")).p2p.to_zarr(tmp_path / "a.zarr")
    assert not (tmp_path / "a.zarr").exists()


def test_chunks_of_the_file_that_was_read(tmp_path):
    """xarray's own `chunk` keeps them, and they may not fit the blocks."""
    read = written(array(((5, 5), (7,))), tmp_path / "a.zarr").a
    assert read.encoding["chunks"] == (5, 7)
    assert written(read.chunk(x=10), tmp_path / "b.zarr").a.encoding["chunks"] == (5, 7)
    rechunked = read.chunk(x=4)
    with pytest.raises(ValueError, match="would overlap"):
        rechunked.to_zarr(tmp_path / "c.zarr", consolidated=False)
    assert written(rechunked, tmp_path / "d.zarr").a.encoding["chunks"] == (4, 7)


def test_datasets_and_their_coordinates(tmp_path):
    ds = array().to_dataset().assign(of_x=("x", da.from_array(VALUES[:, 0], ((7, 3),))))
    ds = ds.assign_coords(lat=(("x",), da.from_array(VALUES[:, 1], ((2, 8),))), z=3.0)
    stored = written(ds, tmp_path / "a.zarr")
    xr.testing.assert_identical(stored.compute(), ds.compute())
    assert stored.a.chunks == ((3, 3, 3, 1), (2, 2, 2, 1))


@pytest.mark.parametrize(
    ("options", "chunks", "shards"),
    [
        ({"encoding": {"a": {"chunks": (2, 1), "shards": (4, 3)}}}, (2, 1), (4, 3)),
        ({"encoding": {"a": {"shards": (4, 3)}}}, (4, 3), (4, 3)),
        ({"encoding": {"a": {"shards": (4, 4)}}, "chunks": {"x": 2}}, (2, 4), (4, 4)),
        ({"encoding": {"a": {"chunks": (4, 3)}}, "chunks": {"x": 5}}, (4, 3), None),
    ],
)
def test_chunks_and_shards_of_an_encoding(tmp_path, options, chunks, shards):
    for data in (array(), array().to_dataset(), array(((10,), (7,)))):
        stored = written(data, tmp_path / "a.zarr", mode="w", zarr_format=3, **options).a
        np.testing.assert_array_equal(stored, VALUES)
        assert stored.encoding["chunks"] == chunks
        assert stored.encoding["shards"] == shards


def test_stores_that_grow_within_a_chunk(tmp_path):
    path, options = tmp_path / "a.zarr", {"consolidated": False}
    shards = {"a": {"chunks": (2, 7), "shards": (4, 7)}}
    ds = array().to_dataset().assign_coords(x=range(10))
    ds[{"x": slice(5)}].p2p.to_zarr(path, zarr_format=3, encoding=shards, **options)
    lazy = ds[{"x": slice(5, 10)}].p2p.to_zarr(path, append_dim="x", compute=False, **options)
    keys = " ".join(map(str, lazy.__dask_graph__()))
    assert len({*re.findall(r"p2p-\w+-\w+", keys)}) == 1
    lazy.compute()
    np.testing.assert_array_equal(xr.open_zarr(path, **options).a, VALUES)
    for region in ("auto", {"x": slice(3, 9)}):
        part = -ds[{"x": slice(3, 9)}]
        part = part if region == "auto" else part.drop_vars("x")
        part.p2p.to_zarr(path, region=region, **options)
        np.testing.assert_array_equal(xr.open_zarr(path, **options).a[3:9], -VALUES[3:9])
    np.testing.assert_array_equal(xr.open_zarr(path, **options).a[:3], VALUES[:3])
