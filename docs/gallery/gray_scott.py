"""Two substances: iterate with two fields by name."""

import dask
import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p


def laplacian(a):
    near = a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:]
    far = a[:-2, :-2] + a[:-2, 2:] + a[2:, :-2] + a[2:, 2:]
    return 0.2 * near + 0.05 * far - a[1:-1, 1:-1]


def react(u, v, feed, kill):
    """Return both fields after a step, without their halos."""
    spread_u, spread_v = laplacian(u), laplacian(v)
    u, v = u[1:-1, 1:-1], v[1:-1, 1:-1]
    rate = u * v**2
    return {
        "u": u + spread_u - rate + feed * (1 - u),
        "v": v + 0.5 * spread_v + rate - (feed + kill) * v,
    }


def start(n):
    """Return fields of n x n points, with a square of substance v."""
    u, v = np.ones((n, n)), np.zeros((n, n))
    centre = slice(n // 2 - 4, n // 2 + 4)
    u[centre, centre], v[centre, centre] = 0.5, 0.25
    return u, v


def main(n=48, steps=100, compare=True):
    """Run it, and compare it with the same program in NumPy."""
    u, v = start(n)
    fields = {
        "u": da.from_array(u, chunks=(n // 4, n // 2)),
        "v": da.from_array(v, chunks=(n // 4, n // 2)),
    }
    lazy = dask_p2p.iterate(
        react, fields, depth=1, steps=steps, feed=0.055, kill=0.062
    )
    (result,) = dask.compute(lazy)
    if compare:  # with the same in NumPy
        for _ in range(steps):
            new = react(
                np.pad(u, 1, "wrap"), np.pad(v, 1, "wrap"), 0.055, 0.062
            )
            u, v = new["u"], new["v"]
        assert np.array_equal(result["u"], u)
        assert np.array_equal(result["v"], v)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
