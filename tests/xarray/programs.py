"""Programs of the accessor, for blocks of any library: their results do not depend on it."""

import numpy as np
import xarray as xr

import dask_p2p.xarray  # noqa: F401
from tests.ops.programs import react, scaled, smoothed

SHAPE = (24, 20)
RNG = np.random.default_rng(0)
VALUES, AREA = RNG.random(SHAPE), 1 + RNG.random(SHAPE)
PROFILE = 1 + RNG.random(SHAPE[:1])


def mean_of_three(block):
    out = block.copy()
    out[1:-1] = (block[:-2] + block[1:-1] + block[2:]) / 3
    return out


def wave(now, before, out):
    out[...] = 1.5 * now[1:-1] + (now[:-2] + now[2:]) / 4 - before


def build(lazy):
    """Return the array of these programs; the function makes a lazy array of values."""
    coords = {
        "t": ("t", np.arange(SHAPE[0]) / 2, {"units": "s"}),
        "x": np.arange(float(SHAPE[1])),
        "area": (("t", "x"), lazy(AREA)),
        "profile": ("t", lazy(PROFILE)),
    }
    return xr.DataArray(lazy(VALUES), coords, ("t", "x"), "u", {"units": "K"})


def variables(data):
    """Return the array or the arrays of a result, and their lazy coordinates, by name."""
    arrays = {"": data} if isinstance(data, xr.DataArray) else dict(data.data_vars)
    coords = {name: x for name, x in data.coords.items() if name in ("area", "profile")}
    return {name: array.variable for name, array in {**arrays, **coords}.items()}


def as_dataset(a):
    return xr.Dataset({"u": a, "v": 2 * a.rename("v")})


PROGRAMS = {
    "transpose": lambda a: a.p2p.transpose("x", "t"),
    "transpose to chunks": lambda a: a.p2p.transpose(..., "t", chunks={"x": 7, "t": -1}),
    "chunk": lambda a: a.p2p.chunk(t=-1, x=3),
    "uneven chunks": lambda a: a.p2p.chunk(t=(5, 19), x=(1, 19)),
    "map_overlap": lambda a: a.p2p.map_overlap(mean_of_three, {"t": 1}, {"t": "periodic"}),
    "reflected": lambda a: a.p2p.map_overlap(mean_of_three, {"t": 2}, "reflect", corners=False),
    "constant": lambda a: a.p2p.map_overlap(np.negative, 1, {"t": 2.5}),
    "fft": lambda a: a.p2p.fft("t"),
    "fft of all": lambda a: a.p2p.fft(),
    "fft of real numbers": lambda a: a.p2p.fft("t", "x", shift=False, true_phase=False),
    "fft of single precision": lambda a: a.astype("f4").p2p.fft("t"),
    "fft of descending times": lambda a: a.isel(t=slice(None, None, -1)).p2p.fft("t"),
    "fft of a dataset": lambda a: as_dataset(a).p2p.fft("t"),
    "there and back": lambda a: a.p2p.fft().p2p.ifft(),
    "half of it back": lambda a: a.p2p.fft("t", "x").p2p.ifft(real_dim="freq_x"),
    "dataset": lambda a: as_dataset(a).p2p.transpose("x", "t").p2p.chunk(x=4),
    "then others": lambda a: a.p2p.transpose("x", "t").isel(x=slice(3, 9)) * 2,
}
#: Programs of sections, which need a cluster.
SECTIONS = {
    "iterate": lambda a: a.p2p.iterate(smoothed, {"t": 1}, 5),
    "iterate with constants": lambda a: a.p2p.iterate(
        scaled, {"t": 1}, 5, boundary={"t": "reflect"}, constants=("area",)
    ),
    "iterate with a profile": lambda a: a.p2p.iterate(
        scaled, {"t": 1}, 5, boundary={"t": "reflect"}, constants=("profile",)
    ),
    "time levels": lambda a: a.p2p.iterate(wave, [{"t": 1}, 0], 4, fields=[a * 0.9])[0],
    "coupled": lambda a: as_dataset(a).p2p.iterate(react, {"t": 1}, 5, fields={"u": "u", "v": "v"}),
}
