"""Derivatives of a cube: spmd with one halo exchange."""

import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p

WEIGHTS = (4 / 5, -1 / 5, 4 / 105, -1 / 280)  # by distance: 1 to 4


def derivative(ctx, f, axis, spacing):
    halo = ctx.update_halo(ctx.with_halo(f, {axis: 4}, "periodic"))
    n = f.shape[axis]

    def shifted(by):
        return halo.take(range(4 + by, 4 + by + n), axis)

    differences = (shifted(k) - shifted(-k) for k in range(1, 5))
    return (
        sum(w * d for w, d in zip(WEIGHTS, differences, strict=True))
        / spacing
    )


def main():
    """Run it, and compare it with a known result."""
    n = 64
    points = 2 * np.pi * np.arange(n) / n
    a, b, c = np.meshgrid(
        points, points, points, indexing="ij", sparse=True
    )
    x = da.from_array(
        np.sin(a + 2 * b) * np.cos(c), chunks=(32, 16, 64)
    )
    lazy = [
        dask_p2p.spmd(derivative, x, axis=axis, spacing=2 * np.pi / n)
        for axis in range(3)
    ]
    result = da.stack(lazy).compute()

    exact = (
        np.cos(a + 2 * b) * np.cos(c),
        2 * np.cos(a + 2 * b) * np.cos(c),
        -np.sin(a + 2 * b) * np.sin(c),
    )
    for computed, expected in zip(result, exact, strict=True):
        np.testing.assert_allclose(computed, expected, atol=1e-6)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
