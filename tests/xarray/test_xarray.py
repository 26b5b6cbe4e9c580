from __future__ import annotations

import doctest

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import dask_p2p
import dask_p2p.xarray
from dask_p2p.errors import InputError
from tests.support import persisted, spread, used


@pytest.fixture
def array():
    values = np.arange(4 * 6 * 5.0).reshape(4, 6, 5)
    result = xr.DataArray(
        da.from_array(values, chunks=(2, 3, 5)),
        dims=("t", "y", "x"),
        coords={
            "t": np.arange("2026-01-01", "2026-01-05", dtype="M8[D]").astype("M8[ns]"),
            "height": (("y", "x"), np.arange(30).reshape(6, 5), {"units": "m"}),
            "station": "north",
        },
        attrs={"units": "K"},
        name="temperature",
    )
    result.encoding = {"dtype": "float32"}
    return result


@pytest.fixture
def dataset(array):
    mask = array.isel(t=0, drop=True).astype("int16").rename("mask").assign_attrs(of="land")
    return xr.Dataset(
        {"temperature": array, "mask": mask, "top": ("x", np.arange(5))}, attrs={"title": "test"}
    )


def assert_moved(result, expected):
    """The same values, names, order, coordinates, attributes and encoding; and still Dask's."""
    xr.testing.assert_identical(result.compute(), expected.compute())
    assert result.encoding == expected.encoding
    is_array = isinstance(result, xr.DataArray)
    for moved, stock in (
        [(result, expected)]
        if is_array
        else zip(result.data_vars.values(), expected.data_vars.values(), strict=True)
    ):
        assert (moved.dims, moved.dtype) == (stock.dims, stock.dtype)
        assert moved.encoding == stock.encoding
        assert type(moved.data) is type(stock.data)


def test_examples_in_docstrings():
    assert doctest.testmod(dask_p2p.xarray).failed == 0


@pytest.mark.parametrize("dims", [(), ("x", "t", "y"), ("y", ...), (..., "t")], ids=str)
def test_transposes_by_name(array, dataset, dims):
    result = array.p2p.transpose(*dims)
    assert_moved(result, array.transpose(*dims))
    axes = [array.dims.index(dim) for dim in result.dims]
    assert result.chunks == dask_p2p.transpose(array.data, axes).chunks
    assert result.data.name.startswith("p2p-transpose")
    assert_moved(dataset.p2p.transpose(*dims), dataset.transpose(*dims))


def test_chunks_of_a_transpose_by_name(array, dataset):
    result = array.p2p.transpose("x", "y", "t", chunks={"y": -1, "x": 2})
    assert_moved(result, array.T)
    assert result.chunks == ((2, 2, 1), (6,), (2, 2))
    moved = dataset.p2p.transpose("x", "y", "t", chunks={"y": 2})
    assert moved.mask.chunks == ((5,), (2, 2, 2))
    assert moved.temperature.chunks == ((5,), (2, 2, 2), (2, 2))


@pytest.mark.parametrize("chunks", [{"t": -1, "x": 2}, {"y": (1, 5)}, {"x": "auto"}, 2, {}, None])
def test_chunks_by_name(array, dataset, chunks):
    for data in (array, dataset):
        result, expected = data.p2p.chunk(chunks), data.chunk({} if chunks is None else chunks)
        assert_moved(result, expected)
        assert isinstance(result.height.data, np.ndarray)
        for name in [None] if data is array else data.data_vars:
            one, stock = (result, expected) if name is None else (result[name], expected[name])
            assert one.chunks == stock.chunks


def test_by_regions_on_a_cluster(client, array):
    x = array.copy(data=spread(client, array.data + 0))
    lazy = x.p2p.transpose("x", "y", "t")
    y = lazy.copy(data=persisted(client, lazy.data))
    assert_moved(y, array.T)
    assert used(client, lazy.data)


@pytest.mark.parametrize("kind", ["array", "dataset"])
def test_wrong_names(kind, request):
    methods = request.getfixturevalue(kind).p2p

    def refused(words, method, *args, **keywords):
        with pytest.raises(InputError, match=words):
            method(*args, **keywords)

    words = r"'z' is no dimension of the array; it has 't', 'y', 'x'"
    refused(words, methods.transpose, "x", "y", "z")
    for dims in [("x", "y"), ("x", "x", "y", "t"), (..., "x", ...)]:
        refused(r"the dimensions \('t', 'y', 'x'\).*got \(", methods.transpose, *dims)
    for chunks, words in (
        ({"z": 1}, r"chunks: 'z' is no dimension .* 't', 'y', 'x'"),
        ({"x": (2, 2)}, r"got chunks={'x': \(2, 2\)}: .*by dimension\.$"),
    ):
        refused(words, methods.transpose, "x", "y", "t", chunks=chunks)
        refused(words, methods.chunk, chunks)
        refused(words, methods.chunk, **chunks)
    renamed = request.getfixturevalue(kind).rename(t="time", y="lat", x="lon")
    refused(r"'latitude' is no dimension .* Use 'lat'\?", renamed.p2p.chunk, latitude=1)
    refused(r"of the dimensions .*got \(1, 2\)\. Use .* {'t': ", methods.chunk, (1, 2))


def smooth(block, weight=1.0):
    return weight * (np.roll(block, 1, 0) + block + np.roll(block, -1, 0))


@pytest.mark.parametrize(
    ("depth", "boundary"),
    [({"t": 1}, {"t": "periodic"}), ({"t": (1, 2), "x": 1}, None), (1, 0), ({"y": 1}, "nearest")],
    ids=str,
)
def test_rims_by_name(array, dataset, depth, boundary):
    axes = {i: depth[d] for i, d in enumerate(array.dims) if d in depth} if depth != 1 else 1
    beyond = {0: "periodic"} if isinstance(boundary, dict) else boundary
    y = dask_p2p.map_overlap(smooth, array.data, depth=axes, boundary=beyond, weight=0.5)
    result = array.p2p.map_overlap(smooth, depth, boundary, weight=0.5)
    assert_moved(result, array.copy(data=y).drop_encoding())
    assert result.data.name == y.name
    smoothed = dataset.p2p.map_overlap(smooth, depth, boundary, weight=0.5)
    xr.testing.assert_identical(smoothed.temperature.compute(), result.compute())
    assert smoothed.attrs == dataset.attrs


def test_arrays_without_rims_stay_and_those_in_memory_are_one_block(array, dataset):
    result = dataset.assign(side=("y", np.arange(6.0))).p2p.map_overlap(np.sqrt, {"y": 1})
    assert isinstance(result.top.data, np.ndarray)
    stock = np.sqrt(dataset[["temperature"]]).assign_attrs(title="test")
    assert_moved(result[["temperature"]], stock)
    assert result.side.chunks == ((6,),)
    np.testing.assert_array_equal(result.side, np.sqrt(np.arange(6)))


@pytest.mark.parametrize("kind", ["array", "dataset"])
def test_wrong_rims(kind, request):
    data = request.getfixturevalue(kind)
    for widths in ({"z": 1}, (1, 1)):
        with pytest.raises(InputError, match=r"depth.* dimension.*'t', 'y', 'x'"):
            data.p2p.map_overlap(smooth, widths)
    with pytest.raises(InputError, match=r"boundary: 'z' is no dimension"):
        data.p2p.map_overlap(smooth, {"x": 1}, {"z": 0})
    with pytest.raises(InputError, match=r"got depth={'y': 9} .*dimension 'y'"):
        data.p2p.map_overlap(smooth, {"y": 9})


def test_the_representation_lists_the_methods(array, dataset):
    head, *lines = repr(array.p2p).splitlines()
    assert head == "<methods of dask_p2p for this DataArray>"
    public = {name for name in dir(array.p2p) if not name.startswith("_")}
    assert {line.split()[0] for line in lines} == public >= {"transpose", "fft", "to_zarr"}
    assert all(len(line.split()) > 3 for line in lines)
    of_dataset = {line.split()[0] for line in repr(dataset.p2p).splitlines()[1:]}
    assert of_dataset == public
