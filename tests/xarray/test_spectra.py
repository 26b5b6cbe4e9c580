import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import dask_p2p.xarray  # noqa: F401
from dask_p2p.errors import InputError


def field(shape=(12, 10), starts=(-3.0, 7.0), steps=(0.5, 0.25), dtype="D", chunks=4):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    values = values.astype(dtype) if dtype == "D" else values.real.astype(dtype)
    coords = {
        name: start + step * np.arange(n)
        for name, n, start, step in zip("xy", shape, starts, steps, strict=True)
    }
    coords["height"] = ("y", np.arange(shape[1]))
    coords["station"] = "north"
    return xr.DataArray(
        da.from_array(values, chunks=chunks), coords, ("x", "y"), "u", {"units": "m"}
    )


def integral(a, name, frequencies):
    """Sums as they are defined, of the array in memory."""
    at = a[name].values
    waves = np.exp(-2j * np.pi * np.outer(frequencies, at)) * (at[1] - at[0])
    return np.moveaxis(
        np.tensordot(waves, a.values, (1, a.get_axis_num(name))), 0, a.get_axis_num(name)
    )


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("shape", [(12, 10), (9, 7)])
def test_true_phase_and_amplitude_are_those_of_the_integral(shape, shift):
    a = field(shape)
    s = a.p2p.fft("x", shift=shift)
    assert s.dims == ("freq_x", "y")
    assert (s.freq_x.values[0] == 0) != shift
    np.testing.assert_allclose(s.values, integral(a, "x", s.freq_x.values), atol=1e-12)
    attrs = {"spacing": pytest.approx(2 / shape[0]), "direct_lag": -3 + shape[0] // 2 / 2}
    assert s.freq_x.attrs == attrs
    assert (s.name, s.attrs, str(s.station.values)) == ("u", {"units": "m"}, "north")
    assert {"height", "y"} <= {*s.coords}
    assert "height" not in a.p2p.fft().coords


def test_as_numpy_does_it():
    a = field()
    s = a.p2p.fft(shift=False, true_phase=False, true_amplitude=False)
    np.testing.assert_allclose(s.values, np.fft.fftn(a.values), atol=1e-12)
    s = a.p2p.fft(true_phase=False, true_amplitude=False, prefix="k")
    assert s.dims == ("kx", "ky")
    np.testing.assert_allclose(s.values, np.fft.fftshift(np.fft.fftn(a.values)), atol=1e-12)


@pytest.mark.parametrize("dtype", ["d", "f"])
def test_real_numbers(dtype):
    a = field(dtype=dtype)
    s = a.p2p.fft(["x"], real_dim="y")
    assert (s.shape, s.dtype) == ((12, 6), "D" if dtype == "d" else "F")
    complex_spectrum = a.p2p.fft().sel(freq_y=s.freq_y.values[:-1])
    atol = 1e-12 if dtype == "d" else 1e-5
    np.testing.assert_allclose(s.values[:, :-1], complex_spectrum.values, atol=atol)
    assert_same(s.p2p.ifft(real_dim="freq_y"), a)


def assert_same(restored, a):
    assert (restored.dims, restored.dtype) == (a.dims, a.dtype)
    np.testing.assert_allclose(restored.values, a.values, atol=1e-6 if a.dtype == "f" else 1e-12)
    for name in a.dims:
        np.testing.assert_allclose(restored[name].values, a[name].values, atol=1e-12)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("true", [True, False])
@pytest.mark.parametrize("shape", [(12, 10), (9, 7)])
def test_round_trips(shape, true, shift):
    a = field(shape)
    s = a.p2p.fft(shift=shift, true_phase=true, true_amplitude=true)
    restored = s.p2p.ifft(true_phase=true, true_amplitude=true)
    assert_same(restored, a)
    assert "freq_y" in s.p2p.ifft("freq_x").dims


@pytest.mark.parametrize("true", [True, False])
@pytest.mark.parametrize("real_dim", [None, "x"])
def test_the_order_of_elements_makes_no_difference(real_dim, true):
    """Latitudes often descend: a negative distance would turn the sign of all."""
    a = field(dtype="d" if real_dim else "D").assign_coords(x=np.arange(12) - 90.0)
    turned = a.isel(x=slice(None, None, -1)).isel(y=slice(None, None, -1))
    expected = a.p2p.fft(real_dim=real_dim, true_phase=true)
    spectrum = turned.p2p.fft(real_dim=real_dim, true_phase=true)
    xr.testing.assert_allclose(spectrum, expected)
    assert spectrum.freq_x.attrs == expected.freq_x.attrs
    restored = spectrum.p2p.ifft(real_dim=real_dim and "freq_x", true_phase=true)
    np.testing.assert_allclose(restored.values, a.values, atol=1e-12)


def test_arrays_of_a_dataset_that_have_the_dimensions_are_transformed():
    values = np.random.default_rng(0).random((6, 8))
    coords = {"t": np.arange(6) / 2, "x": np.arange(8.0), "label": ("x", list("abcdefgh"))}
    a = xr.DataArray(da.from_array(values, chunks=(2, -1)), coords, ("t", "x"), "a")
    ds = xr.Dataset(
        {"a": a, "b": 2 * a, "only_x": ("x", np.arange(8)), "one": 3}, attrs={"by": "me"}
    )
    for transform in (
        lambda data: data.p2p.fft("t"),
        lambda data: data.p2p.fft("t", true_phase=False).p2p.ifft("freq_t", true_phase=False),
        lambda data: data.p2p.fft("t").p2p.ifft(),
    ):
        spectra = transform(ds)
        assert [*spectra] == [*ds]
        assert spectra.attrs == ds.attrs
        for name in ("a", "b"):
            xr.testing.assert_identical(spectra[name].compute(), transform(ds[name]).compute())
        for name in ("only_x", "one"):
            xr.testing.assert_identical(spectra[name], ds[name])
    every = ds[["a", "only_x"]].p2p.fft()
    assert (every.a.dims, every.only_x.dims) == (("freq_t", "freq_x"), ("freq_x",))
    assert "label" not in every.coords


def test_times_and_arrays_in_memory_and_without_coordinates():
    hours = np.arange("2026-01-01", "2026-01-02", dtype="M8[h]").astype("M8[ns]")
    a = xr.DataArray(np.cos(2 * np.pi * np.arange(24) / 6), {"t": hours}, ["t"])
    s = a.p2p.fft()
    top = s.freq_t.values[np.argmax(abs(s.values))]
    assert abs(top) == pytest.approx(1 / (6 * 3600))
    assert (s.freq_t.attrs["direct_lag"], s.freq_t.attrs["units"]) == (12 * 3600, "1/(s)")
    lat = "lat", [0, 5, 10], {"units": "degrees_north"}
    s = xr.DataArray(np.ones(3), {"lat": lat}, ["lat"]).p2p.fft()
    assert s.freq_lat.attrs["units"] == "1/(degrees_north)"
    assert xr.DataArray(np.ones(4), dims="z").p2p.fft().freq_z.values[0] == -0.5


@pytest.mark.parametrize("calendar", ["noleap", "360_day", "standard"])
@pytest.mark.parametrize("turned", [False, True])
def test_times_of_models_are_seconds_too(calendar, turned):
    pytest.importorskip("cftime")
    calendar_options = {"periods": 24, "freq": "6h", "calendar": calendar}
    values = np.random.default_rng(0).random(24)
    seconds = xr.DataArray(da.from_array(values, chunks=5), {"t": np.arange(24) * 21600.0}, ["t"])
    a = seconds.assign_coords(t=xr.date_range("2001-02-25", use_cftime=True, **calendar_options))
    if turned:
        a = a.isel(t=slice(None, None, -1))
    for options in ({}, {"real_dim": "t"}, {"shift": False}):
        xr.testing.assert_allclose(a.p2p.fft(**options), seconds.p2p.fft(**options))
        spectrum = a.p2p.fft(**options)
        assert spectrum.freq_t.attrs == pytest.approx(seconds.p2p.fft(**options).freq_t.attrs)
    restored = a.p2p.fft().p2p.ifft()
    np.testing.assert_allclose(restored.values, values, atol=1e-12)
    np.testing.assert_allclose(restored.t.values, np.arange(24) * 21600.0, atol=1e-6)


def test_months_of_models_are_not_even():
    pytest.importorskip("cftime")
    for calendar, even in [("noleap", False), ("360_day", True)]:
        t = xr.date_range("2001-01-01", periods=12, freq="MS", calendar=calendar, use_cftime=True)
        a = xr.DataArray(da.ones(12), {"t": t}, ["t"])
        if even:
            assert a.p2p.fft().freq_t.attrs["spacing"] == pytest.approx(1 / (360 * 86400))
        else:
            with pytest.raises(InputError, match=r"'t'.*even distances.*cftime"):
                a.p2p.fft()


@pytest.mark.parametrize("dtype", ["f4", "i2", "u1", "i8"])
@pytest.mark.parametrize("turned", [False, True])
def test_coordinates_of_few_digits(dtype, turned):
    """The distance of the first two has an error that the last place has n times."""
    n, start, step = (3600, -180, 0.1) if dtype == "f4" else (120, 3, 2)
    exact = start + step * np.arange(n)
    a = xr.DataArray(np.random.default_rng(0).random(n), {"x": exact}, ["x"])
    rounded = a.assign_coords(x=exact.astype(dtype))
    if turned:
        rounded = rounded.isel(x=slice(None, None, -1))
    for real_dim in (None, "x"):
        expected, spectrum = a.p2p.fft(real_dim=real_dim), rounded.p2p.fft(real_dim=real_dim)
        assert spectrum.freq_x.dtype == "f8"
        np.testing.assert_allclose(spectrum.freq_x, expected.freq_x, rtol=1e-7)
        np.testing.assert_allclose(spectrum.values, expected.values, atol=1e-3)
    restored = rounded.p2p.fft().p2p.ifft()
    np.testing.assert_allclose(restored.values, a.values, atol=1e-9)
    np.testing.assert_allclose(restored.x.values, exact, atol=2e-5)


@pytest.mark.parametrize("shift", [False, True])
def test_frequencies_of_few_digits(shift):
    """Phases far from the origin are as those of exact frequencies."""
    n = 3600
    a = xr.DataArray(np.random.default_rng(0).random(n), {"x": -180 + 0.1 * np.arange(n)}, ["x"])
    exact = a.p2p.fft(shift=shift)
    rounded = exact.freq_x.astype("f4").assign_attrs(exact.freq_x.attrs)
    restored = exact.assign_coords(freq_x=rounded.values.astype("f4"))
    restored.freq_x.attrs.update(exact.freq_x.attrs)
    assert restored.freq_x.dtype == "f4"
    restored = restored.p2p.ifft()
    np.testing.assert_allclose(restored.values.real, a.values, atol=2e-4)
    np.testing.assert_allclose(restored.x.values, a.x.values, atol=1e-4)


def test_fine_coordinates_of_few_digits():
    """The last digit is a hundredth of the distance."""
    at = (350 + 0.003 * np.arange(2000)).astype("f4")
    assert abs(np.diff(at) / 0.003 - 1).max() > 0.005
    spectrum = xr.DataArray(np.ones(2000), {"x": at}, ["x"]).p2p.fft()
    assert spectrum.freq_x.attrs["spacing"] == pytest.approx(1 / 6, rel=1e-5)
    with pytest.raises(InputError, match="even"):
        xr.DataArray(np.ones(3), {"x": np.float32([350, 350, 351])}, ["x"]).p2p.fft()


LABELS = {
    "text": np.array(["a", "b", "c", "d"]),
    "objects": np.array(["a", "b", "c", "d"], object),
    "mixed": np.array([0, "b", None, 2.0], object),
    "integers as objects": np.arange(4).astype(object),
    "dates": pd.date_range("2001-01-01", periods=4).date.astype(object),
    "periods": pd.period_range("2001-01-01", periods=4, freq="D"),
    "bytes": np.array([b"a", b"b", b"c", b"d"]),
    "bools": np.array([False, True, False, True]),
    "complex": np.arange(4) * 1j,
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
@pytest.mark.parametrize("turned", [False, True])
def test_labels_that_are_no_numbers_are_refused(labels, turned):
    a = xr.DataArray(da.ones((4, 4)), {"x": labels[::-1] if turned else labels}, ["x", "y"])
    words = r"(?s)coordinate 'x' of numbers or times, got .*Drop it, a.drop_vars\('x'\)"
    for call in (
        lambda: a.p2p.fft("x"),
        lambda: a.p2p.fft(),
        lambda: a.p2p.fft("y", real_dim="x"),
        lambda: a.p2p.ifft("x", prefix=""),
        lambda: a.p2p.ifft("x", real_dim="x", prefix=""),
    ):
        with pytest.raises(InputError, match=words):
            call()
    assert a.p2p.fft("y").x.equals(a.x)


def test_calendars_that_differ_are_refused():
    cftime = pytest.importorskip("cftime")
    dates = [cftime.DatetimeNoLeap(2001, 1, 1), cftime.Datetime360Day(2001, 1, 2)]
    a = xr.DataArray(da.ones(2), dims="x").assign_coords(
        xr.Coordinates({"x": ("x", np.array(dates, object))}, indexes={})
    )
    with pytest.raises(InputError, match="'x' of numbers or times"):
        a.p2p.fft()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: a.p2p.fft("z"), "'z' is no dimension of the array; it has 'x', 'y'"),
        (lambda a: a.p2p.fft(["x", "x"]), "each once"),
        (lambda a: a.p2p.ifft(), "dim=None"),
        (lambda a: a.to_dataset().p2p.fft("z"), "'z' is no dimension .* it has 'x', 'y'"),
        (lambda a: xr.Dataset({"b": a.isel(x=0)}).p2p.fft(["x", "y"]), "got 'b' with"),
        (lambda a: xr.Dataset().p2p.fft(), "expected dimensions"),
        (lambda a: a.assign_coords(x=np.arange(12) ** 2).p2p.fft(), "'x'.*even"),
        (lambda a: a.isel(x=[0]).p2p.fft(), "two values"),
        (lambda a: a.isel(x=[]).p2p.fft("x"), "two values"),
        (lambda a: a.isel(x=[]).p2p.ifft("x", prefix=""), "two values"),
        (lambda a: a.assign_coords(x=[*np.arange(11.0), np.nan]).p2p.fft(), "even"),
        (lambda a: a.assign_coords(x=[0, np.nan, *range(2, 12)]).p2p.fft(), "even"),
        (lambda a: a.p2p.ifft("y", prefix=""), "along 'y' with 0 at index"),
        (lambda a: a.p2p.fft(real_dim="x"), "x.real"),
    ],
)
def test_wrong_input_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call(field())
