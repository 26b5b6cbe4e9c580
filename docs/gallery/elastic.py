"""Elastic waves: five fields and two phases."""

import dask
import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p

LAMBDA, MU, RHO = 1e9, 1e9, 1000.0
STEP = 0.5 * 1e-3 / 10  # half a millisecond by ten metres


def after(a, axis):
    """Return differences to the next points."""
    ahead = a[2:, 1:-1] if axis == 0 else a[1:-1, 2:]
    return ahead - a[1:-1, 1:-1]


def before(a, axis):
    """Return differences to the points before."""
    behind = a[:-2, 1:-1] if axis == 0 else a[1:-1, :-2]
    return a[1:-1, 1:-1] - behind


def velocities(vx, vy, xx, yy, xy):
    by_x = after(xx, 1) + before(xy, 0)
    by_y = after(yy, 0) + before(xy, 1)
    return {
        "vx": vx[1:-1, 1:-1] + STEP / RHO * by_x,
        "vy": vy[1:-1, 1:-1] + STEP / RHO * by_y,
    }


def stresses(vx, vy, xx, yy, xy):
    ex, ey = before(vx, 1), before(vy, 0)
    shear = after(vx, 0) + after(vy, 1)
    interior = slice(1, -1), slice(1, -1)
    return {
        "xx": xx[interior]
        + STEP * ((LAMBDA + 2 * MU) * ex + LAMBDA * ey),
        "yy": yy[interior]
        + STEP * ((LAMBDA + 2 * MU) * ey + LAMBDA * ex),
        "xy": xy[interior] + STEP * MU * shear,
    }


def start(n):
    y, x = np.arange(n)[:, None] - n / 2, np.arange(n) - n / 2
    fields = {
        name: np.zeros((n, n)) for name in ("vx", "vy", "yy", "xy")
    }
    return fields | {"xx": 1e6 * np.exp(-(x**2 + y**2) / 9)}


def main(n=40, steps=50, compare=True):
    """Run it, and compare it with the same program in NumPy."""
    fields = start(n)
    lazy = dask_p2p.iterate(
        [velocities, stresses],
        {
            k: da.from_array(a, chunks=(n // 4, n // 2))
            for k, a in fields.items()
        },
        depth=1,
        steps=steps,
        boundary=0.0,
    )
    (result,) = dask.compute(lazy)
    if compare:  # with the same in NumPy
        for _ in range(steps):
            fields |= velocities(
                **{k: np.pad(a, 1) for k, a in fields.items()}
            )
            fields |= stresses(
                **{k: np.pad(a, 1) for k, a in fields.items()}
            )
        assert all(np.array_equal(result[k], fields[k]) for k in fields)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
