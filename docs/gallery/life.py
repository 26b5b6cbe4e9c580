"""The game of life: corners, small integers."""

import dask
import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p

# A cell's neighbours in a block of three by three.
EIGHT = [(i, j) for i in range(3) for j in range(3) if (i, j) != (1, 1)]


def next_cells(a):
    """Return the cells after a step, from `a` with a halo."""
    near = [a[i : i - 2 or None, j : j - 2 or None] for i, j in EIGHT]
    count = np.sum(near, axis=0)
    return (
        (count == 3) | ((count == 2) & (a[1:-1, 1:-1] == 1))
    ).astype("i1")


def step(cells):
    return {"cells": next_cells(cells)}


def living(cells):
    return cells[1:-1, 1:-1].sum()


def main(n=32, steps=50, compare=True):
    """Run it, and compare it with the same program in NumPy."""
    cells = np.random.default_rng(0).integers(0, 2, (n, n)).astype("i1")
    lazy = dask_p2p.iterate(
        step,
        {"cells": da.from_array(cells, chunks=(n // 2, n // 2))},
        depth=1,
        steps=steps,
        boundary="periodic",
        record={"living": living},
    )
    (result,) = dask.compute(lazy)
    if compare:  # with the same in NumPy
        counts = []
        for _ in range(steps):
            cells = next_cells(np.pad(cells, 1, "wrap"))
            counts.append(cells.sum())
        assert np.array_equal(result["cells"], cells)
        assert np.array_equal(result["living"], counts)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
