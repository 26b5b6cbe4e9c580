"""Spins at a temperature: the same random numbers on any ranks."""

from functools import partial

import dask
import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p


def drawn(rows, columns, *seed):
    """Return random numbers of some rows and their columns."""
    return np.array(
        [
            np.random.default_rng([*seed, n]).random(columns)
            for n in rows
        ]
    )


def flip(s, rows, columns, colour, step, coupling):
    """Return the spins after a phase, from `s` with a halo."""
    near = s[:-2, 1:-1] + s[2:, 1:-1] + s[1:-1, :-2] + s[1:-1, 2:]
    centres = s[1:-1, 1:-1]
    limit = np.exp(-2 * coupling * centres * near)
    draw = drawn(rows.ravel(), columns.max() + 1, step, colour)
    is_new = draw[:, columns.ravel()] < limit
    return np.where(
        is_new & ((rows + columns) % 2 == colour), -centres, centres
    )


def phase(s, at, colour, coupling):
    return {"s": flip(s, *at.index, colour, at.step, coupling)}


def magnetization(s):
    return s[1:-1, 1:-1].sum()


def main(n=24, steps=20, compare=True):
    """Run it, and compare it with the same program in NumPy."""
    coupling = 0.5  # the strength of a bond by the temperature
    s = np.random.default_rng(0).choice([-1.0, 1.0], (n, n))
    lazy = dask_p2p.iterate(
        [partial(phase, colour=0), partial(phase, colour=1)],
        {"s": da.from_array(s, chunks=(n // 2, n // 2))},
        depth=1,
        steps=steps,
        boundary="periodic",
        record={"magnetization": magnetization},
        coupling=coupling,
    )
    (result,) = dask.compute(lazy)
    if compare:  # with the same in NumPy
        index, sums = np.ogrid[:n, :n], []
        for step in range(steps):
            for colour in (0, 1):
                s = flip(
                    np.pad(s, 1, "wrap"), *index, colour, step, coupling
                )
            sums.append(s.sum())
        assert np.array_equal(result["s"], s)
        assert np.array_equal(result["magnetization"], sums)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
