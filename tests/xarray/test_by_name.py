import dask.array as da
import numpy as np
import pytest
import xarray as xr

import dask_p2p
import dask_p2p.xarray
from dask_p2p.errors import InputError

T, Y, X = 2, 6, 8
VALUES = np.random.default_rng(0).normal(size=(T, Y, X))


def spread(u, out, weight=0.1):
    """Along the last axis alone."""
    out[:] = u[..., 1:-1] + weight * (u[..., 2:] - u[..., :-2])


def wave(u, before, speed, factor, out):
    out[:] = 2 * u[:, 1:-1] - before + factor * speed * (u[:, 2:] - u[:, :-2])


@pytest.fixture
def array():
    coords = {"y": np.arange(6.0), "x": np.arange(8) * 2.0, "station": "north"}
    data = da.from_array(VALUES, chunks=(1, 3, 4))
    result = xr.DataArray(data, coords, ("t", "y", "x"), "u", {"units": "K"})
    result.encoding = {"dtype": "float32"}
    return result


@pytest.fixture
def dataset(array):
    u = array.isel(t=0)
    speed = xr.DataArray(np.linspace(1, 2, X), {"x": array.x}, ("x",))
    return xr.Dataset({"u": u, "before": u.T.chunk(x=2) + 1, "speed": speed}, attrs={"of": "test"})


def computed(result):
    return result.compute(scheduler="threads")


def test_an_array(array):
    result = array.p2p.iterate(spread, {"x": 1}, 3, boundary={"x": "periodic"}, weight=0.2)
    assert (result.chunks, result.encoding) == (array.chunks, {})
    expected = VALUES
    for _ in range(3):
        expected = expected + 0.2 * (np.roll(expected, -1, 2) - np.roll(expected, 1, 2))
    xr.testing.assert_identical(computed(result), computed(array.copy(data=expected)))
    same = dask_p2p.iterate(spread, array.data, {2: 1}, 3, boundary={2: "periodic"}, weight=0.2)
    assert result.data.name == same.name


@pytest.mark.parametrize("depth", [{"x": 1}, [{"x": 1}, {}]], ids=["of all", "of each"])
def test_fields_and_constants_by_name(dataset, depth):
    """Those whose dimensions come in another order are turned; what lacks some is repeated."""

    def function(u, before, speed, factor, out):
        assert speed.shape == out.shape
        wave(u, before[:, 1:-1] if isinstance(depth, dict) else before, speed, factor, out)

    options = {"boundary": 0.0, "constants": ["speed", 0.5]}
    result = dataset.p2p.iterate(function, depth, 3, fields=["u", "before"], **options)
    u, before = VALUES[0], VALUES[0] + 1
    for _ in range(3):
        out = np.empty_like(u)
        wave(np.pad(u, ((0, 0), (1, 1))), before, dataset.speed.values, 0.5, out)
        u, before = out, u
    assert np.array_equal(computed(result.u).values, u)
    assert np.array_equal(computed(result.before).values, before)
    assert (result.attrs, result.u.attrs) == (dataset.attrs, dataset.u.attrs)
    xr.testing.assert_identical(result.speed, dataset.speed)
    of_arrays = dataset.u.p2p.iterate(
        function, depth, 3, fields=[dataset.before], boundary=0.0, constants=[dataset.speed, 0.5]
    )
    assert isinstance(of_arrays, tuple)
    assert [array.name for array in of_arrays] == ["u", "before"]
    assert [array.data.name for array in of_arrays] == [result.u.data.name, result.before.data.name]


def test_constants_of_an_array(array):
    """A coordinate by its name, one number as an array, and one for all members."""

    def scaled(u, x, factor, table, out):
        assert (factor, table.shape) == (2.0, (3,))
        out[:] = x * factor * table[0]

    constants = ["x", xr.DataArray(2.0), np.ones(3)]
    result = array.p2p.iterate(scaled, {}, 1, constants=constants)
    assert (computed(result) == array.x * 2).all()


def test_wrong_names(array, dataset):
    dims = r"^(depth|boundary): 'z' is no dimension of the array; it has 't', 'y', 'x'\. Use one"
    for keywords in ({"depth": {"z": 1}}, {"depth": [{"z": 1}]}, {"boundary": {"z": 0}}):
        with pytest.raises(InputError, match=dims):
            array.p2p.iterate(spread, **{"depth": {"x": 1}, "steps": 1, **keywords})
    for option in ("save", "checkpoint", "record", "max_time"):
        for data, fields in ((dataset, ["u"]), (array, None)):
            with pytest.raises(InputError, match=rf"^{option}: .*fields={{'u': 'u'}}"):
                data.p2p.iterate(spread, {"x": 1}, 1, fields=fields, **{option: "1 s"})
    with pytest.raises(InputError, match=r"got depth={'x': 9} .*\(dimension 'x'\)"):
        array.p2p.iterate(spread, {"x": 9}, 1)
    with pytest.raises(InputError, match=r"boundary out of .*got 'open'"):
        array.p2p.iterate(spread, {"x": 1}, 1, boundary={"x": "open"})
    for fields in (None, ["u", "v"], [dataset.u], ()):
        with pytest.raises(InputError, match=r"names of the dataset's arrays, \('u', 'before', "):
            dataset.p2p.iterate(spread, {"x": 1}, 1, fields=fields)
    with pytest.raises(InputError, match=r"fields: expected .* as DataArrays, got str"):
        array.p2p.iterate(spread, {"x": 1}, 1, fields="u")
    with pytest.raises(InputError, match=r"fields: .*field's dimensions .*got \('y', 'x'\)"):
        array.p2p.iterate(spread, {"x": 1}, 1, fields=[dataset.u])
    with pytest.raises(InputError, match=r"constants: expected the name of .*'before'.* got 'v'"):
        dataset.p2p.iterate(spread, {"x": 1}, 1, fields="u", constants=["v"])
    for owner in (array, dataset):
        options = {} if owner is array else {"fields": "u"}
        with pytest.raises(InputError, match="constants: expected a list, as the fields have no"):
            owner.p2p.iterate(spread, {"x": 1}, 1, constants={"v": 2.0}, **options)
    with pytest.raises(InputError, match="constants: expected only dimensions of the fields"):
        dataset.p2p.iterate(spread, {"x": 1}, 1, fields="u", constants=[array])


def test_labels_that_differ(array):
    shifted = array.assign_coords(x=array.x + 1)
    for option in ({"fields": [shifted]}, {"constants": [shifted.isel(t=0)]}):
        with pytest.raises(InputError, match=r"sizes and labels of the newest field .*Align them"):
            array.p2p.iterate(spread, {"x": 1}, 1, **option)
    unlabelled = array.isel(t=0).drop_vars("x").isel(x=slice(3))
    with pytest.raises(InputError, match="sizes and labels"):
        array.p2p.iterate(spread, {"x": 1}, 1, constants=[unlabelled])


def test_chunks_that_are_unknown(array):
    data = array.data[:, array.data[0, :, 0] > 0]
    with pytest.raises(InputError, match="expected known chunk sizes"):
        xr.DataArray(data, dims=("t", "y", "x")).p2p.iterate(spread, {"x": 1}, 1)


# --- coupled fields of a dataset


def exchange(a, b, speed, at, gain=0.5):
    assert at.shape == (6, 8)
    return {
        "a": a[:, 1:-1] + gain * speed * (b[:, 2:] - b[:, :-2]),
        "b": b[:, 1:-1] - gain * speed * (a[:, 2:] - a[:, :-2]),
    }


def test_coupled_fields_of_a_dataset(dataset):
    names = {"a": "u", "b": "before"}
    options = {"fields": names, "constants": {"speed": "speed"}, "gain": 0.1}
    result = dataset.p2p.iterate(exchange, {"x": 1}, 3, **options)
    a, b, speed = VALUES[0], VALUES[0] + 1, dataset.speed.values
    for _ in range(3):
        pads = [np.pad(level, ((0, 0), (1, 1)), "wrap") for level in (a, b)]

        class At:
            shape = (6, 8)

        new = exchange(*pads, speed, At, gain=0.1)
        a, b = new["a"], new["b"]
    np.testing.assert_allclose(result.u.values, a, rtol=1e-12)
    np.testing.assert_allclose(result.before.transpose(*result.u.dims).values, b, rtol=1e-12)
    assert (result.attrs, result.u.attrs) == (dataset.attrs, dataset.u.attrs)
    assert {*result.coords} == {*dataset.coords}
    assert result.speed.identical(dataset.speed)


def test_time_levels_among_coupled_fields(dataset):
    def leap(w):
        now, before = w
        return {"w": now[:, 2:] + now[:, :-2] - before[:, 1:-1]}

    result = dataset.p2p.iterate(leap, {"x": 1}, 2, fields={"w": ["u", "before"]})
    now, before = VALUES[0], VALUES[0] + 1
    for _ in range(2):
        now, before = np.roll(now, -1, 1) + np.roll(now, 1, 1) - before, now
    np.testing.assert_allclose(result.u.values, now)
    np.testing.assert_allclose(result.before.transpose(*result.u.dims).values, before)


def test_wrong_coupled_fields_are_refused(dataset, array):
    def refused(message, data=dataset, **options):
        options = {"fields": {"a": "u", "b": "before"}, **options}
        with pytest.raises(InputError, match=message):
            data.p2p.iterate(exchange, {"x": 1}, 1, **options)

    refused("expected names of the dataset's arrays", fields={"a": "u", "b": "nothing"})
    refused("constants: expected a mapping", constants=["speed"])
    refused("expected a dataset for fields by name", data=array)
    options = {"record": {"speed": lambda a: a.sum()}, "constants": {"speed": "speed"}}
    refused("names that no variable of the dataset has, got 'speed'", **options)
    refused("parameters with the names", constants={})


# --- output of coupled fields


def growing(a, b):
    return {"a": a + 1, "b": b * 2}


def test_records_become_variables(dataset):
    record = {
        "mass": lambda a: a.sum(),
        "both": dask_p2p.Record(lambda a: np.array([a.sum(), 1.0]), every=2, shape=(2,)),
    }
    options = {"fields": {"a": "u", "b": "before"}, "record": record}
    result = dataset.p2p.iterate(growing, {}, 4, **options).compute()
    sums = [VALUES[0].sum() + n * Y * X for n in (1, 2, 3, 4)]
    np.testing.assert_allclose(result.mass, sums)
    assert result.mass.dims == ("mass_record",)
    np.testing.assert_allclose(result.both[:, 0], sums[1::2])
    assert int(result.steps) == 4
    np.testing.assert_allclose(result.u, VALUES[0] + 4)


@pytest.mark.parametrize("without_index", [[], ["t", "y"]], ids=str)
def test_frames_are_a_dataset(tmp_path, array, without_index):
    pytest.importorskip("zarr")
    days = xr.date_range("2001-01-01", periods=T)
    ds = array.assign_coords(t=days).to_dataset().assign(v=array.assign_coords(t=days) * 2)
    ds = ds.drop_indexes(without_index)
    frames = dask_p2p.Save(tmp_path / "frames", 2, region=np.s_[:, ::2])
    files = dask_p2p.Checkpoint(tmp_path / "states", every=2)
    for steps in (4, 6):  # a longer run adds frames
        options = {"fields": {"a": "u", "b": "v"}, "save": frames, "checkpoint": files}
        result = ds.p2p.iterate(growing, {}, steps, **options).compute()
    np.testing.assert_array_equal(result.v, VALUES * 2.0**7)
    stored = xr.open_zarr(tmp_path / "frames", consolidated=False)
    assert stored.a.dims == ("frame", "t", "y", "x")
    assert stored.frame.values.tolist() == [2, 4, 6]
    for name in ("t", "x"):
        np.testing.assert_array_equal(stored[name], ds[name])
    np.testing.assert_array_equal(stored.y, ds.y[::2])
    np.testing.assert_array_equal(stored.a[-1], result.u[:, ::2])
