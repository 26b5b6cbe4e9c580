import doctest
import re

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr

import dask_p2p
import dask_p2p.xarray
from dask_p2p.errors import InputError
from tests.ops.programs import scaled
from tests.support import persisted, spread, used
from tests.xarray.programs import PROGRAMS, SECTIONS, VALUES, as_dataset, build, variables


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
    pairs = [(result, expected)]
    if isinstance(result, xr.Dataset):
        pairs = zip(result.data_vars.values(), expected.data_vars.values(), strict=True)
    for moved, stock in pairs:
        assert (moved.dims, moved.dtype) == (stock.dims, stock.dtype)
        assert (moved.encoding, type(moved.data)) == (stock.encoding, type(stock.data))


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


def test_arrays_without_rims_stay_and_those_in_memory_are_one_block(dataset):
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


@pytest.fixture
def arrays(strict_cupy):
    """The same array twice: in CuPy blocks, and in NumPy's."""

    def lazy(values):
        return da.from_array(values, chunks=(6, -1)[: values.ndim])

    return build(lambda values: lazy(values).map_blocks(strict_cupy.asarray)), build(lazy)


@pytest.fixture
def in_memory(strict_cupy):
    """The same array twice, in memory, of CuPy and of NumPy."""
    return build(strict_cupy.asarray), build(np.asarray)


def check(result, expected, cupy):
    """Compare a result of CuPy blocks with one of NumPy blocks."""
    assert result.coords.keys() == expected.coords.keys()
    results, expected_variables = variables(result), variables(expected)
    assert results.keys() == expected_variables.keys()
    for name, variable in results.items():
        reference = expected_variables[name]
        assert isinstance(getattr(variable.data, "_meta", variable.data), cupy.ndarray)
        assert (variable.dims, variable.chunks) == (reference.dims, reference.chunks)
        with dask.config.set(scheduler="sync"):
            values, host_values = variable.compute().data, reference.compute().data
        assert isinstance(values, cupy.ndarray)
        assert values.dtype == variable.dtype == reference.dtype
        tolerance = 1000 * np.finfo(values.dtype).eps * abs(host_values).max()
        np.testing.assert_allclose(values.get(), host_values, 0, tolerance)


def on_host(values):
    return values.get() if hasattr(values, "get") else values


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_numpy(name, arrays, strict_cupy):
    check(*map(PROGRAMS[name], arrays), strict_cupy)


@pytest.mark.parametrize("name", PROGRAMS)
def test_arrays_in_memory(name, in_memory, strict_cupy):
    check(*map(PROGRAMS[name], in_memory), strict_cupy)


@pytest.mark.parametrize("name", SECTIONS)
def test_results_of_sections_have_the_kind_of_the_fields(name, arrays, strict_cupy):
    for variable in variables(SECTIONS[name](arrays[0])).values():
        assert isinstance(variable.data._meta, strict_cupy.ndarray)


def test_a_number_in_gpu_memory_is_a_constant(arrays, strict_cupy):
    a = arrays[0].assign_coords(number=strict_cupy.asarray(3.0))
    result = a.p2p.iterate(scaled, {"t": 1}, 2, constants=("number",))
    assert isinstance(result.data._meta, strict_cupy.ndarray)


def test_coordinates_in_gpu_memory(strict_cupy):
    """These have no index: an index holds its values in host memory."""

    def with_times(values, times):
        coords = xr.Coordinates({"t": ("t", times)}, indexes={})
        return xr.DataArray(values, coords, ("t", "x"))

    times = np.arange(24.0)[::-1] / 2
    a = with_times(strict_cupy.asarray(VALUES), strict_cupy.asarray(times))
    b = with_times(VALUES, times)
    for program in (lambda a: a.p2p.fft("t"), lambda a: a.p2p.fft("t").p2p.ifft()):
        result, expected = program(a), program(b)
        check(result, expected, strict_cupy)
        for name in expected.coords:
            np.testing.assert_array_equal(on_host(result[name].data), on_host(expected[name].data))


@pytest.mark.parametrize("lazy", [True, False])
def test_to_zarr(lazy, arrays, in_memory, tmp_path):
    pytest.importorskip("zarr")
    a, host_array = arrays if lazy else in_memory
    with dask.config.set(scheduler="sync"):
        a.p2p.to_zarr(tmp_path / "array", chunks={"t": 5}, consolidated=False)
        as_dataset(a).p2p.to_zarr(tmp_path / "dataset", consolidated=False)
    with xr.open_zarr(tmp_path / "array", consolidated=False) as stored:
        xr.testing.assert_equal(stored.u.compute(), host_array.compute())
        assert stored.u.chunks[0] == (5, 5, 5, 5, 4)
    with xr.open_zarr(tmp_path / "dataset", consolidated=False) as stored:
        xr.testing.assert_equal(stored.compute(), as_dataset(host_array).compute())


def test_arrays_of_cupy_xarray(strict_cupy):
    pytest.importorskip("cupy_xarray", reason="needs it: pip install cupy-xarray")
    a = build(lambda values: values).chunk(t=6).as_cupy()
    assert a.cupy.is_cupy
    turned = a.p2p.transpose("x", "t").p2p.fft("t")
    assert turned.cupy.is_cupy
    with dask.config.set(scheduler="sync"):
        result = turned.cupy.as_numpy().compute()
    expected = build(lambda values: values).p2p.transpose("x", "t").p2p.fft("t")
    np.testing.assert_allclose(result.data, expected.compute().data)


pytest.importorskip("zarr")
MATRIX = np.arange(70.0).reshape(10, 7)
UNEVEN = ((3, 3, 2, 2), (2, 5))


def uneven_array(chunks=UNEVEN, **encoding):
    a = xr.DataArray(da.from_array(MATRIX, chunks), dims=("x", "y"), name="a", attrs={"units": "m"})
    a.encoding = encoding
    return a


def written(data, path, **options):
    data.p2p.to_zarr(path, consolidated=False, **options)
    return xr.open_zarr(path, consolidated=False)


def test_chunks_by_dimension(tmp_path):
    assert written(uneven_array(), tmp_path / "a.zarr", chunks={"x": 5}).a.chunks[0] == (5, 5)
    assert written(uneven_array(), tmp_path / "b.zarr", chunks=-1).a.chunks == ((10,), (7,))
    assert written(uneven_array(), tmp_path / "c.zarr", chunks={"y": "auto"}).a.chunks[1] == (7,)
    memory = xr.DataArray(MATRIX, dims=("x", "y"), name="a")
    assert written(memory, tmp_path / "d.zarr", chunks={"x": 4}).a.chunks == ((4, 4, 2), (7,))
    assert written(memory, tmp_path / "e.zarr").a.shape == (10, 7)


def test_chunks_that_zarr_has_not(tmp_path):
    with pytest.raises(InputError, match=r"'a'.*one size along 'x'.*\(4, 6\).*chunks=\{'x': 6\}"):
        uneven_array().p2p.to_zarr(tmp_path / "a.zarr", chunks={"x": (4, 6)})
    memory = xr.DataArray(MATRIX, dims=("x", "y"), name="a")
    with pytest.raises(InputError, match="one size along 'x'"):
        memory.p2p.to_zarr(tmp_path / "a.zarr", chunks={"x": (4, 6)})
    with pytest.raises(InputError, match="'z' is no dimension"):
        uneven_array().p2p.to_zarr(tmp_path / "a.zarr", chunks={"z": 3})
    unknown = uneven_array().data[uneven_array().data[:, 0] > 8]
    with pytest.raises(InputError, match="compute_chunk_sizes"):
        xr.DataArray(unknown, dims=("x", "y")).p2p.to_zarr(tmp_path / "a.zarr")
    assert not (tmp_path / "a.zarr").exists()


def test_chunks_of_the_file_that_was_read(tmp_path):
    """xarray's own `chunk` keeps them, and they may not fit the blocks."""
    read = written(uneven_array(((5, 5), (7,))), tmp_path / "a.zarr").a
    assert read.encoding["chunks"] == (5, 7)
    assert written(read.chunk(x=10), tmp_path / "b.zarr").a.encoding["chunks"] == (5, 7)
    rechunked = read.chunk(x=4)
    with pytest.raises(ValueError, match="would overlap"):
        rechunked.to_zarr(tmp_path / "c.zarr", consolidated=False)
    assert written(rechunked, tmp_path / "d.zarr").a.encoding["chunks"] == (4, 7)


def test_datasets_and_their_coordinates(tmp_path):
    ds = uneven_array().to_dataset().assign(of_x=("x", da.from_array(MATRIX[:, 0], ((7, 3),))))
    ds = ds.assign_coords(lat=(("x",), da.from_array(MATRIX[:, 1], ((2, 8),))), z=3.0)
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
    for data in (uneven_array(), uneven_array().to_dataset(), uneven_array(((10,), (7,)))):
        stored = written(data, tmp_path / "a.zarr", mode="w", zarr_format=3, **options).a
        np.testing.assert_array_equal(stored, MATRIX)
        assert (stored.encoding["chunks"], stored.encoding["shards"]) == (chunks, shards)


def test_stores_that_grow_within_a_chunk(tmp_path):
    path, options = tmp_path / "a.zarr", {"consolidated": False}
    shards = {"a": {"chunks": (2, 7), "shards": (4, 7)}}
    ds = uneven_array().to_dataset().assign_coords(x=range(10))
    ds[{"x": slice(5)}].p2p.to_zarr(path, zarr_format=3, encoding=shards, **options)
    lazy = ds[{"x": slice(5, 10)}].p2p.to_zarr(path, append_dim="x", compute=False, **options)
    keys = " ".join(map(str, lazy.__dask_graph__()))
    assert len({*re.findall(r"p2p-\w+-\w+", keys)}) == 1
    lazy.compute()
    np.testing.assert_array_equal(xr.open_zarr(path, **options).a, MATRIX)
    for region in ("auto", {"x": slice(3, 9)}):
        part = -ds[{"x": slice(3, 9)}]
        part = part if region == "auto" else part.drop_vars("x")
        part.p2p.to_zarr(path, region=region, **options)
        np.testing.assert_array_equal(xr.open_zarr(path, **options).a[3:9], -MATRIX[3:9])
    np.testing.assert_array_equal(xr.open_zarr(path, **options).a[:3], MATRIX[:3])
