"""Particles in strips: alltoall, an output with any number of rows."""

import dask
import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p
from dask_p2p import PerRank, Rows


def move(particles, step):
    """Move particles in place; a row has number, position x and y."""
    _, x, y = particles.T
    x[:] = (x + 0.2 * np.sin(2 * np.pi * y + step)) % 1
    y[:] = (y + 0.2 * np.sin(2 * np.pi * x + 2 * step)) % 1


def drift(ctx, particles, steps):
    def sorted_in(local):
        """Send each particle to the rank of its strip."""
        owner = (local[:, 1] * ctx.size).astype(int)
        parts = [local[owner == rank] for rank in range(ctx.size)]
        return np.concatenate(ctx.alltoall(parts))

    local = sorted_in(particles)
    for step in range(steps):
        move(local, step)
        local = sorted_in(local)
    return {"particles": local, "counts": len(local)}


def main(count=1000, steps=12, compare=True):
    """Run it, and compare it with the same program in NumPy."""
    rng = np.random.default_rng(0)
    particles = np.empty((count, 3))
    particles[:, 0] = np.arange(count)
    particles[:, 1:] = rng.normal(0.5, 0.1, (count, 2)) % 1
    lazy = dask_p2p.spmd(
        drift,
        da.from_array(particles, chunks=(count // 4, 3)),
        partition=(0,),
        steps=steps,
        outputs={"particles": Rows(float, (3,)), "counts": PerRank(0)},
    )
    (result,) = dask.compute(lazy)
    rows = result["particles"]
    strips = np.repeat(
        np.arange(len(result["counts"])), result["counts"]
    )
    assert np.array_equal(
        (rows[:, 1] * len(result["counts"])).astype(int), strips
    )
    if compare:  # with the same in NumPy
        for step in range(steps):
            move(particles, step)
        in_order = rows[np.argsort(rows[:, 0])]
        np.testing.assert_allclose(in_order, particles, atol=1e-9)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
