"""A tracer in a stream: a changing inflow, constants with halos."""

import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p
from dask_p2p import Field

DT, MID = 0.2, slice(1, -1)


def pulses(y, t):
    return np.exp(-((y - 0.5) ** 2) / 0.01) * np.sin(0.05 * t) ** 2


def flux(before, after):
    """Return fluxes, from (tracer, velocity, diffusivity)."""
    (c0, v0, k0), (c1, v1, k1) = before, after
    v = 0.5 * (v0 + v1)
    return np.where(v > 0, c0, c1) * v - 0.5 * (k0 + k1) * (c1 - c0)


def carried(c, u, v, k):
    """Return the tracer after a step; all arrays have halos."""
    along_x = [a[MID] for a in (c, u, k)]
    along_y = [a[:, MID] for a in (c, v, k)]
    fx = flux([a[:, :-1] for a in along_x], [a[:, 1:] for a in along_x])
    fy = flux([a[:-1] for a in along_y], [a[1:] for a in along_y])
    return c[MID, MID] - DT * (
        fx[:, 1:] - fx[:, :-1] + fy[1:] - fy[:-1]
    )


def step(c, u, v, k):
    return {"c": carried(c, u, v, k)}


def inflow(rim, inside, at):
    rows = at.index[0].clip(0, at.shape[0] - 1)
    rim[...] = pulses(rows / at.shape[0], at.step * DT)


def stream(ny, nx):
    """Return the velocities and the diffusivity."""
    y, x = np.mgrid[:ny, :nx] / ny
    u = 1 + 0.5 * np.sin(np.pi * y)
    v = 0.6 * np.sin(2 * np.pi * x) * np.sin(np.pi * y)
    return u, v, 0.05 + 0.2 * (x > 1)


def main(ny=24, nx=36, steps=60, compare=True):
    """Run it, and compare it with the same program in NumPy."""
    u, v, k = stream(ny, nx)
    sides = {0: "nearest", 1: (inflow, "nearest")}
    lazy = dask_p2p.iterate(
        step,
        {"c": da.zeros((ny, nx), chunks=(ny // 2, nx // 3))},
        depth=1,
        steps=steps,
        boundary=sides,
        constants={
            "u": Field(u, depth=1, boundary="nearest"),
            "v": Field(v, depth=1, boundary={0: "odd", 1: "nearest"}),
            "k": Field(k, depth=1, boundary="nearest"),
        },
    )
    result = lazy["c"].compute()
    if compare:  # with the same in NumPy
        uu, vv, kk = (np.pad(a, 1, "edge") for a in (u, v, k))
        vv[0], vv[-1] = -vv[1], -vv[-2]
        rows = np.arange(-1, ny + 1).clip(0, ny - 1) / ny
        c = np.zeros((ny, nx))
        for number in range(steps):
            halo = np.pad(c, 1, "edge")
            halo[:, 0] = pulses(rows, number * DT)
            c = carried(halo, uu, vv, kk)
        assert np.array_equal(result, c)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
