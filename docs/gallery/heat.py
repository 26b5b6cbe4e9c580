"""Heat in a plane: iterate with one field."""

import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p


def heat(u, out, r):
    inner = u[1:-1, 1:-1]
    out[:] = (1 - 4 * r) * inner
    out += r * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])


def main():
    """Run it, and compare it with a known result."""
    n, r, steps = 60, 0.2, 200
    angle = 2 * np.pi * np.arange(n) / n
    start = np.sin(angle)[:, None] * np.sin(angle)
    x = da.from_array(start, chunks=(15, 30))
    result = dask_p2p.iterate(
        heat, x, depth=1, steps=steps, r=r
    ).compute()

    factor = 1 - 8 * r * np.sin(np.pi / n) ** 2
    np.testing.assert_allclose(
        result, factor**steps * start, atol=1e-13
    )
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
