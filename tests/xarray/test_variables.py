import re
from pathlib import Path

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from xarray import groupers

import dask_p2p.xarray  # noqa: F401
from dask_p2p.errors import InputError, UnsupportedArrayError

README = Path(__file__).parents[2] / "README.md"


def rotate(u, out):
    out[:] = u[1:-1]


def read(u, constant, out):
    out[:] = constant


#: Methods of arrays and datasets, which change an array `u` of x and y.
CALLS = {
    "transpose": lambda a: a.p2p.transpose("y", "x"),
    "chunk": lambda a: a.p2p.chunk(x=2),
    "map_overlap": lambda a: a.p2p.map_overlap(np.sqrt, {"x": 1}),
    "iterate": lambda a: a.p2p.iterate(rotate, {"x": 1}, 2, fields=fields_of(a)),
}
#: Of arrays alone.
TRANSFORMS = {"fft": lambda a: a.p2p.fft("x"), "ifft": lambda a: a.p2p.ifft("x", prefix="")}


def fields_of(a):
    return ["u"] if isinstance(a, xr.Dataset) else None


# --- arrays around arrays ---


class Around(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of an unknown library, around another array."""

    def __init__(self, inner):
        self.inner, self.shape, self.ndim, self.dtype = inner, inner.shape, inner.ndim, inner.dtype

    def transpose(self, *axes):
        return type(self)(self.inner.transpose(*axes))

    def __getitem__(self, index):
        return type(self)(self.inner[index])

    def __array_function__(self, *args, **kwargs):
        raise AssertionError("it must not be computed with")

    __array_ufunc__ = __array_function__

    def __dask_graph__(self):
        return self.inner.__dask_graph__()


class AroundWithChunks(Around):
    @property
    def chunks(self):
        return self.inner.chunks


def with_units(values):
    pint = pytest.importorskip("pint")
    return pint.UnitRegistry(force_ndarray_like=True).Quantity(values, "m")


AROUND = pytest.mark.parametrize(
    ("around", "words"),
    [
        (with_units, r"expected .* got pint\..*\.pint\.dequantify\(\)"),
        (Around, r"expected .* got tests\..*Around\. .* Dask array inside it"),
        (AroundWithChunks, r"expected .* got tests\..*Around.*\. .* Dask array inside it"),
    ],
    ids=["units", "unknown", "unknown with chunks"],
)


def around_dask(around):
    data = around(da.ones((8, 6), chunks=(4, 6)))
    return xr.DataArray(data, {"x": np.arange(-4.0, 4)}, ("x", "y"), "u")


@AROUND
@pytest.mark.parametrize("call", [*CALLS.values(), *TRANSFORMS.values()], ids=[*CALLS, *TRANSFORMS])
def test_an_array_around_a_dask_array_is_refused(around, words, call):
    array = around_dask(around)
    for data in [array, array.to_dataset()][: 2 if call in CALLS.values() else 1]:
        with pytest.raises(UnsupportedArrayError, match=f"'u': {words}"):
            call(data)


@AROUND
@pytest.mark.parametrize("name", ["transpose", "chunk"])
def test_so_is_a_coordinate_that_would_move(around, words, name):
    height = around_dask(around).variable
    a = xr.DataArray(da.ones((8, 6), chunks=4), {"height": height}, ("x", "y"), "u")
    for data in (a, a.to_dataset()):
        with pytest.raises(UnsupportedArrayError, match=f"'height': {words}"):
            CALLS[name](data)


@AROUND
def test_so_is_what_a_function_reads(around, words):
    wide = around_dask(around).rename("wide")
    a = xr.DataArray(da.ones((8, 6), chunks=4), {"wide": wide}, ("x", "y"), "u")
    for data, constant in [(a.drop_vars("wide"), wide), (a, "wide"), (a.to_dataset(), "wide")]:
        with pytest.raises(UnsupportedArrayError, match=f"'wide': {words}"):
            data.p2p.iterate(read, {}, 1, fields=fields_of(data), constants=[constant])
    with pytest.raises(UnsupportedArrayError, match=f"'wide': {words}"):
        a.p2p.iterate(read, {}, 1, constants=[wide[0, 0]])


@AROUND
def test_what_stays_is_kept_as_it_is(around, words):
    dataset = around_dask(around).to_dataset()
    for result in (
        dataset.p2p.transpose("x", "y"),
        dataset.assign(z=("z", da.ones(4, chunks=2))).p2p.chunk(z=1),
        dataset.assign(z=("z", np.ones(4))).p2p.map_overlap(np.sqrt, {"z": 1}),
    ):
        assert result.u.variable._data is dataset.u.variable._data
    a = xr.DataArray(da.ones((8, 6), chunks=4), {"height": dataset.u.variable}, ("x", "y"))
    for result in (
        a.p2p.map_overlap(np.sqrt, {"x": 1}),
        a.p2p.iterate(rotate, {"x": 1}, 1),
        a.assign_coords(edge=dataset.u[:, 0].variable).p2p.fft("y"),
    ):
        coordinate = result.coords["edge" if "edge" in result.coords else "height"]
        assert type(coordinate.variable._data) is type(dataset.u.variable._data)


def test_units_in_memory():
    array = xr.DataArray(with_units(np.ones((8, 6))), {"x": np.arange(-4.0, 4)}, ("x", "y"), "u")
    turned = array.p2p.transpose("y", "x")
    assert (turned.data == array.data.T).all()
    assert turned.data.units == array.data.units
    calls = CALLS | TRANSFORMS
    for call in [calls[name] for name in calls if name != "transpose"]:
        with pytest.raises(UnsupportedArrayError, match=r"'u': .*\.pint\.dequantify\(\)"):
            call(array)
    dataset = array.to_dataset().assign(z=("z", da.ones(4, chunks=2))).p2p.chunk(z=1)
    assert dataset.u.variable._data is array.variable._data
    places = xr.Coordinates({"x": ("x", with_units(np.arange(8.0)))}, indexes={})
    with pytest.raises(UnsupportedArrayError, match=r"'x': .*\.pint\.dequantify\(\)"):
        xr.DataArray(da.ones(8), places, "x", "u").p2p.fft()


# --- chunks of groups ---


def days(n=731, calendar=None):
    if calendar:
        pytest.importorskip("cftime")
        time = xr.date_range("2000-01-01", periods=n, calendar=calendar, use_cftime=True)
    else:
        time = pd.date_range("2000-01-01", periods=n)
    return xr.DataArray(
        da.arange(n * 2, chunks=9).reshape(n, 2), {"time": time}, ("time", "x"), "u"
    )


class Halves(groupers.Resampler):
    """Of a user's own."""

    def compute_chunks(self, variable, *, dim):
        n = variable.size
        return (n // 2, n - n // 2)

    def factorize(self, group):
        raise NotImplementedError

    def reset(self):
        return self


GROUPS = {
    "months": lambda: groupers.TimeResampler("MS"),
    "years": lambda: groupers.TimeResampler("YE"),
    "seasons": lambda: groupers.SeasonResampler(["DJF", "MAM", "JJA", "SON"]),
    "halves": Halves,
}


@pytest.mark.parametrize(
    ("groups", "missing", "calendar"),
    [
        ("months", False, None),
        ("months", True, "noleap"),
        ("years", True, None),
        ("seasons", False, "noleap"),
        ("halves", False, None),
    ],
)
def test_chunks_are_those_of_groups(groups, missing, calendar):
    groups = GROUPS[groups]
    a = days(calendar=calendar)
    if missing:
        a = a.isel(time=a.time.dt.month.isin((1, 2, 3)).values)
    a = a.assign_coords(late=("time", da.arange(a.sizes["time"], chunks=50)))
    for data in (a, a.to_dataset(), a.compute()):
        expected = data.chunk(time=groups())
        for result in (data.p2p.chunk(time=groups()), data.p2p.chunk({"time": groups()})):
            assert result.chunksizes["time"] == expected.chunksizes["time"]
            xr.testing.assert_identical(result.compute(), data.compute())
    turned = a.to_dataset().p2p.transpose("x", "time", chunks={"time": groups()})
    assert turned.u.chunks[1] == a.chunk(time=groups()).chunks[0]
    chunked = a.p2p.chunk({"time": groups()}, x=1)
    assert chunked.chunks == (a.chunk(time=groups()).chunks[0], (1, 1))


def test_groups_of_what_has_no_times():
    a = days()
    words = r"a coordinate '(time|x)' that .*TimeResampler.* can group.*Give sizes"
    months = groupers.TimeResampler("MS")
    for array, chunks in [
        (a.drop_vars("time"), {"time": months}),
        (a, {"x": months}),
        (a.assign_coords(time=np.arange(731)), {"time": months}),
        (a, months),
    ]:
        for data in (array, array.to_dataset()):
            with pytest.raises(InputError, match=words):
                data.p2p.chunk(chunks)


# --- chunks of files ---

OF_FILES = {
    "chunks": (4, 6),
    "shards": (8, 6),
    "preferred_chunks": {"x": 4, "y": 6},
    "chunksizes": (4, 6),
}
OTHERS = {"dtype": np.dtype("f4"), "_FillValue": -1.0, "original_shape": (8, 6)}


@pytest.fixture
def opened():
    """As it was read from a file: data, a lazy coordinate and two in memory."""
    values = np.arange(48.0).reshape(8, 6)
    coords = {
        "lazy": (("x", "y"), da.from_array(values, chunks=(4, 6))),
        "known": (("x", "y"), values),
        "x": np.arange(-4.0, 4),
    }
    a = xr.DataArray(da.from_array(values, chunks=(4, 6)), coords, ("x", "y"), "u")
    result = a.to_dataset().assign(few=("y", np.arange(6.0)), other=a.drop_vars("x").variable + 1)
    for name in ("u", "lazy", "known", "other"):
        result[name].encoding = {**OF_FILES, **OTHERS}
    result["few"].encoding = {"chunks": (3,), **OTHERS}
    result["x"].encoding = {"chunks": (8,), **OTHERS}
    return result


def encodings(result):
    return {name: variable.encoding for name, variable in result.variables.items()}


def as_dataset(result):
    return result if isinstance(result, xr.Dataset) else result.to_dataset()


@pytest.mark.parametrize("kind", ["dataset", "array"])
@pytest.mark.parametrize(
    ("call", "changed"),
    [
        (lambda a: a.p2p.chunk(x=2), {"u", "lazy", "other"}),
        (lambda a: a.p2p.chunk({"x": -1, "y": 3}), {"u", "lazy", "other", "few"}),
        (lambda a: a.p2p.chunk(x=4), set()),
        (lambda a: a.p2p.chunk(), set()),
        (lambda a: a.p2p.transpose(), {"u", "lazy", "known", "other"}),
        (lambda a: a.p2p.transpose("x", "y"), set()),
        (lambda a: a.p2p.transpose("x", "y", chunks={"x": 2}), {"u", "lazy", "other"}),
        (lambda a: a.p2p.transpose("x", "y", chunks={"x": 4}), set()),
    ],
)
def test_chunks_of_files_go_where_others_come(opened, call, changed, kind):
    data = opened.u if kind == "array" else opened
    before = encodings(opened)
    result = as_dataset(call(data))
    if kind == "dataset" and changed != {"u", "lazy", "known", "other"}:
        changed = changed | {"few"} if result.few.chunks else changed
    for name, encoding in encodings(result).items():
        if name in changed:
            expected = {key: value for key, value in before[name].items() if key not in OF_FILES}
        else:
            expected = before[name]
        assert encoding == expected, name
    assert encodings(opened) == before, "what was given stays as it was"


def test_chunks_of_files_go_with_other_blocks_of_what_was_in_memory(opened):
    for data in (opened.compute(), opened.u.compute()):
        result = as_dataset(data.p2p.chunk(x=2))
        assert (result.u.encoding, result.known.encoding) == (OTHERS, {**OF_FILES, **OTHERS})
        turned = as_dataset(data.p2p.transpose("y", "x"))
        assert {*encodings(turned)} >= {"u", "known"}
        for name in ("u", "known", "lazy"):
            assert turned[name].encoding == OTHERS


def test_coordinates_of_what_has_other_values_keep_their_chunks(opened):
    for result in (
        opened.u.p2p.map_overlap(np.sqrt, {"x": 1}),
        opened.p2p.map_overlap(np.sqrt, {"x": 1}),
        opened.p2p.iterate(rotate, {"x": 1}, 1, fields="u"),
        opened.u.p2p.iterate(rotate, {"x": 1}, 1),
    ):
        assert as_dataset(result).u.encoding == {}
        for name in ("lazy", "known"):
            assert result[name].encoding == {**OF_FILES, **OTHERS}
    roots = opened.p2p.map_overlap(np.sqrt, {"x": 1})
    assert roots.few.encoding == opened.few.encoding
    _, turned = opened.u.p2p.iterate(
        lambda u, before, out: rotate(u, out), {"x": 1}, 1, fields=[opened.u.transpose("y", "x")]
    )
    edge = opened.u.assign_coords(edge=opened.lazy[:, 0])
    edge.edge.encoding = {"chunks": (4,)}
    spectrum = edge.p2p.fft("y")
    assert (spectrum.encoding, spectrum.edge.encoding) == ({}, {"chunks": (4,)})
    assert turned.dims == ("x", "y")


@pytest.fixture
def stored(tmp_path):
    """A folder with a store of days; chunks of a lazy coordinate differ."""
    pytest.importorskip("zarr")
    values = np.random.default_rng(0).random((40, 60, 10)).astype("f4")
    xr.Dataset(
        {"t": (("time", "lat", "lon"), da.from_array(values, chunks=(5, 60, 10)))},
        {
            "time": pd.date_range("2001-01-01", periods=40),
            "area": (("lat", "lon"), da.ones((60, 10), chunks=(60, 5))),
        },
    ).to_zarr(tmp_path / "days.zarr", consolidated=False)
    return tmp_path


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part in the Zarr")
def test_the_line_of_the_readme_makes_a_store_of_a_store(stored, monkeypatch):
    import zarr

    monkeypatch.chdir(stored)
    days = xr.open_zarr("days.zarr", consolidated=False)
    (line,) = re.findall(r"`(days\.p2p.*to_zarr\(.*\))`", README.read_text("utf-8"))
    exec(line, {"days": days})
    series = xr.open_zarr("series.zarr", consolidated=False)
    xr.testing.assert_identical(series.compute(), days.compute())
    assert zarr.open("series.zarr")["t"].chunks == (40, 30, 10)
    assert zarr.open("series.zarr")["area"].chunks == (30, 5)
    assert series.t.chunks == ((40,), (30, 30), (10,))
