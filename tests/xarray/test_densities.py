"""Power spectra, cross spectra, trends and windows have the values of scipy."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

from dask_p2p.errors import AxesError, InputError
from dask_p2p.xarray.densities import _values
from tests.support import persisted

xr = pytest.importorskip("xarray")
signal = pytest.importorskip("scipy.signal")

import dask_p2p.xarray  # noqa: E402, F401

STEP = 0.25


def series(n=24, seed=0, dtype="f8", chunks=7):
    values = np.random.default_rng(seed).standard_normal((n, 3))
    values += np.arange(n)[:, None] / 5 + 1  # a trend
    x = -3 + STEP * np.arange(n)
    return xr.DataArray(
        da.from_array(values.astype(dtype), chunks=(chunks, 2)),
        {"x": x, "of_x": ("x", x), "y": [0.0, 1, 2]},
        ("x", "y"),
        "u",
        {"units": "m"},
    )


WINDOWS = ["hann", "hamming", "blackman", None]
TRENDS = [None, "constant", "linear"]


def of_scipy(name, *arrays, scaling, detrend, window, one_sided):
    """The function's values, at the sorted frequencies."""
    frequencies, values = getattr(signal, name)(
        *[each.values for each in arrays],
        1 / STEP,
        window or "boxcar",
        detrend=detrend or False,
        return_onesided=one_sided,
        scaling=scaling,
        axis=0,
        **({"nperseg": arrays[0].sizes["x"]} if name == "csd" else {}),
    )
    order = np.argsort(frequencies)
    return frequencies[order], values[order]


@pytest.mark.parametrize("n", [24, 25])
@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize("scaling", ["density", "spectrum"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("detrend", TRENDS)
def test_power_spectra_of_scipy(n, one_sided, scaling, window, detrend):
    a = series(n)
    options = {"scaling": scaling, "detrend": detrend, "window": window}
    found = a.p2p.power_spectrum("x", real_dim="x" if one_sided else None, **options)
    frequencies, expected = of_scipy("periodogram", a, one_sided=one_sided, **options)
    np.testing.assert_allclose(found.freq_x, frequencies)
    np.testing.assert_allclose(found.values, expected, atol=1e-12)
    assert (found.dims, found.dtype, found.name) == (("freq_x", "y"), "f8", "u")
    assert found.attrs == {}
    assert "of_x" not in found.coords
    assert isinstance(found.data, da.Array)


@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize("scaling", ["density", "spectrum"])
@pytest.mark.parametrize(("window", "detrend"), [("hann", "linear"), (None, None)])
def test_cross_spectra_of_scipy(one_sided, scaling, window, detrend):
    a, b = series(), series(seed=1, chunks=5).transpose("y", "x")
    options = {"scaling": scaling, "detrend": detrend, "window": window}
    found = a.p2p.cross_spectrum(b, "x", real_dim="x" if one_sided else None, **options)
    frequencies, expected = of_scipy("csd", a, b.T, one_sided=one_sided, **options)
    np.testing.assert_allclose(found.freq_x, frequencies)
    np.testing.assert_allclose(found.values, expected.conj(), atol=1e-12)
    assert found.dims == ("freq_x", "y")


@pytest.mark.parametrize("real_dim", [None, "x", "y"])
@pytest.mark.parametrize("shape", [(12, 10), (9, 7)])
def test_sums_over_frequencies_are_mean_squares(shape, real_dim):
    """The definition in the documentation, for two dimensions."""
    values = np.random.default_rng(0).standard_normal(shape)
    coords = {
        name: np.arange(n) * step for name, n, step in zip("xy", shape, (0.5, 3), strict=True)
    }
    a = xr.DataArray(da.from_array(values, chunks=4), coords, ("x", "y"))
    mean_square = (values**2).mean()
    density = a.p2p.power_spectrum(real_dim=real_dim)
    area = density.freq_x.attrs["spacing"] * density.freq_y.attrs["spacing"]
    assert float(density.sum() * area) == pytest.approx(mean_square)
    spectrum = a.p2p.power_spectrum(real_dim=real_dim, scaling="spectrum")
    assert float(spectrum.sum()) == pytest.approx(mean_square)
    same = a.p2p.cross_spectrum(a, real_dim=real_dim)
    np.testing.assert_allclose(same.values, density.values, atol=1e-12)


def test_the_amplitude_of_a_wave():
    t = np.arange("2026-01-01", "2026-01-05", dtype="M8[h]").astype("M8[ns]")
    a = xr.DataArray(3 * np.cos(2 * np.pi * np.arange(96) / 12), {"t": t}, ["t"]).chunk(t=20)
    for window in WINDOWS:
        found = a.p2p.power_spectrum(real_dim="t", scaling="spectrum", window=window)
        top = found[int(found.values.argmax())]
        assert float(top.freq_t) == pytest.approx(1 / (12 * 3600))
        assert float(top) == pytest.approx(9 / 2)
    density = a.p2p.power_spectrum(real_dim="t")
    assert float(density.max()) == pytest.approx(9 / 2 * 96 * 3600)  # over a step of frequency


def test_the_direction_of_a_coordinate_makes_no_difference():
    a, b = series(), series(seed=1)
    turned = [each.isel(x=slice(None, None, -1)) for each in (a, b)]
    options = {"window": "hann", "detrend": "linear"}
    for found, expected in [
        (turned[0].p2p.power_spectrum("x", **options), a.p2p.power_spectrum("x", **options)),
        (
            turned[0].p2p.cross_spectrum(turned[1], "x", **options),
            a.p2p.cross_spectrum(b, "x", **options),
        ),
    ]:
        np.testing.assert_allclose(found.values, expected.values, atol=1e-12)


@pytest.mark.parametrize("kind", ["constant", "linear"])
@pytest.mark.parametrize("dtype", ["f8", "f4", "i4", "c16"])
def test_trends_of_scipy(kind, dtype):
    a = series(dtype=dtype)
    found = a.p2p.detrend("x", kind)
    expected = signal.detrend(a.values, axis=0, type=kind)
    np.testing.assert_allclose(found.values, expected, atol=1e-5 if dtype == "f4" else 1e-12)
    assert found.dtype == ("f8" if dtype == "i4" else dtype)
    assert found.attrs == {"units": "m"}
    xr.testing.assert_identical(found.coords.to_dataset(), a.coords.to_dataset())


def test_planes():
    x, y = np.arange(6.0), np.array([0.0, 1, 5, 6, 8])  # not evenly spaced
    plane = 3 + 2 * x[:, None] - 7 * y
    a = xr.DataArray(da.from_array(plane, chunks=(4, 2)), {"x": x, "y": y}, ("x", "y"))
    np.testing.assert_allclose(a.p2p.detrend(kind="linear"), 0, atol=1e-12)
    rest = np.random.default_rng(0).standard_normal(plane.shape)
    found = (a + rest).p2p.detrend(kind="linear")
    design = np.stack([np.ones(plane.size), np.repeat(x, 5), np.tile(y, 6)], axis=1)
    fitted = design @ np.linalg.lstsq(design, (plane + rest).ravel(), rcond=None)[0]
    np.testing.assert_allclose(found, plane + rest - fitted.reshape(plane.shape), atol=1e-12)
    one = xr.DataArray([[3.0, 4.0]], dims=("x", "y")).p2p.detrend("x", "linear")
    np.testing.assert_array_equal(one, [[0, 0]])


@pytest.mark.parametrize("window", WINDOWS[:3])
@pytest.mark.parametrize("n", [1, 8, 9])
def test_windows_of_scipy(window, n):
    np.testing.assert_allclose(_values(window, n), signal.get_window(window, n), atol=1e-12)


def test_windows_along_dimensions():
    a = series(dtype="f4")
    found = a.p2p.window(["x", "y"], "hann")
    expected = a.values * np.outer(signal.get_window("hann", 24), signal.get_window("hann", 3))
    np.testing.assert_allclose(found.values, expected, atol=1e-6)
    assert (found.dtype, found.attrs, found.chunks) == ("f4", {"units": "m"}, a.chunks)
    own = a.p2p.window("x", lambda n: signal.get_window(("tukey", 0.5), n))
    expected = a.values * signal.get_window(("tukey", 0.5), 24)[:, None]
    np.testing.assert_allclose(own.values, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a: a.p2p.power_spectrum(scaling="power"), InputError, "'density', 'spectrum', got"),
        (
            lambda a: a.p2p.power_spectrum(detrend="mean"),
            InputError,
            "detrend: .*'linear', None, got 'mean'",
        ),
        (lambda a: a.p2p.window("x", "hanning"), InputError, "'hann', .*got 'hanning'.*function"),
        (lambda a: a.p2p.window("x", lambda n: np.ones(3)), InputError, "returns 24 numbers.*3"),
        (lambda a: a.p2p.detrend("z"), AxesError, "'z' is no dimension"),
        (lambda a: a.p2p.cross_spectrum(a.values), InputError, "other: .*got ndarray"),
        (lambda a: a.p2p.cross_spectrum(a[:, 0]), InputError, "dimensions .*broadcast"),
        (lambda a: a.p2p.cross_spectrum(a[1:]), InputError, "labels of the first array.*align"),
        (lambda a: a.assign_coords(x=a.x**3).p2p.power_spectrum(), InputError, "even distances"),
    ],
)
def test_wrong_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call(series())


def test_on_a_cluster(client):
    a = series(64, chunks=16)
    x = a.copy(data=persisted(client, a.data))
    found = x.p2p.power_spectrum("x", real_dim="x", window="hann", detrend="linear").compute()
    _, expected = of_scipy(
        "periodogram", a, scaling="density", detrend="linear", window="hann", one_sided=True
    )
    np.testing.assert_allclose(found.values, expected, atol=1e-12)
