"""Multigrid: spmd, coarser grids, a small system on all ranks."""

from functools import partial

import dask
import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p
from dask_p2p import LocalBlock, Same


def laplacian(u, h):
    """Return -Δu of values with a halo, for cells at distance h."""
    near = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    return (4 * u[1:-1, 1:-1] - near) / h**2


def smoothed(halo, u, b, h):
    for _ in range(2):
        u = u + 0.2 * h**2 * (b - laplacian(halo(u), h))
    return u


def cycle(halos, direct, u, b, h):
    """Return better values of u, by functions that add halos."""
    halo, *coarser = halos
    if not coarser:
        return direct(b, h)
    u = smoothed(halo, u, b, h)
    r = b - laplacian(halo(u), h)
    r = (r[::2, ::2] + r[1::2, ::2] + r[::2, 1::2] + r[1::2, 1::2]) / 4
    error = cycle(coarser, direct, np.zeros_like(r), r, 2 * h)
    return smoothed(halo, u + error.repeat(2, 0).repeat(2, 1), b, h)


def odd(a):
    """Return an array with its halo, the negative mirror image."""
    p = np.pad(a, 1, "symmetric")
    for rim in (p[0], p[-1], p[:, 0], p[:, -1]):
        rim *= -1
    return p


def solved(b, h):
    """Solve the whole system of a small grid."""
    units = np.eye(b.size).reshape(b.size, *b.shape)
    columns = [laplacian(odd(unit), h).ravel() for unit in units]
    return np.linalg.solve(np.array(columns).T, b.ravel()).reshape(
        b.shape
    )


def potential(ctx, b, cycles):
    grids = [ctx.grid_of()]
    while min(grids[-1].shape) > 4:
        grids.append(grids[-1].coarser())
    halos = [
        partial(grid.pad, depth=1, boundary="odd") for grid in grids
    ]
    fine = halos[0]
    box = tuple(slice(*along) for along in grids[-1].box)

    def direct(b, h):
        return solved(grids[-1].gather(b), h)[box]

    u, h, norms = np.zeros_like(b), 1 / ctx.shape[0], np.zeros(cycles)
    for number in range(cycles):
        u = cycle(halos, direct, u, b, h)
        residual = b - laplacian(fine(u), h)
        norms[number] = ctx.allreduce((residual**2).sum()) ** 0.5
    return {"u": u, "norms": norms}


def main(n=32, cycles=8, compare=True):
    """Run it for a power of two, and compare it with NumPy."""
    b = np.zeros((n, n))
    places = np.random.default_rng(0).integers(0, n, (12, 2))
    b[tuple(places.T)] = np.where(np.arange(12) % 2, 1.0, -1.0)
    lazy = dask_p2p.spmd(
        potential,
        da.from_array(b, chunks=(n // 2, n // 2)),
        cycles=cycles,
        outputs={"u": LocalBlock(), "norms": Same(np.zeros(cycles))},
    )
    (result,) = dask.compute(lazy)
    assert result["norms"][-1] < 1e-6 * result["norms"][0]
    if compare:  # with the same in NumPy
        halos, h, u = (
            [odd] * int(np.log2(n) - 1),
            1 / n,
            np.zeros((n, n)),
        )
        for number in range(cycles):
            u = cycle(halos, solved, u, b, h)
            norm = ((b - laplacian(odd(u), h)) ** 2).sum() ** 0.5
            np.testing.assert_allclose(
                result["norms"][number], norm, rtol=1e-6
            )
        assert np.array_equal(result["u"], u)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
