"""Acoustic wave: two time levels, 25 points in space."""

import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p

# By distance: 0 to 4.
WEIGHTS = (-205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560)


def wave(u, before, c2, out):
    interior = (slice(4, -4),) * 3
    np.multiply(u[interior], 3 * WEIGHTS[0], out=out)
    for axis in range(3):
        for k, weight in enumerate(WEIGHTS[1:], 1):
            for shift in (-k, k):
                at = [slice(4, -4)] * 3
                at[axis] = slice(4 + shift, u.shape[axis] - 4 + shift)
                out += weight * u[tuple(at)]
    out *= c2
    out += 2 * u[interior] - before


def main():
    """Run it, and compare it with a known result."""
    n, dt, steps = 24, 0.005, 50
    angle = 2 * np.pi * np.arange(n) / n
    mode = (
        np.sin(angle)[:, None, None]
        * np.sin(angle)[:, None]
        * np.sin(angle)
    )

    def standing(step):
        return np.cos(3**0.5 * dt * step) * mode

    u, before = (
        da.from_array(standing(step), chunks=(6, 12, 24))
        for step in (0, -1)
    )
    c2 = da.full(
        (n, n, n), (dt * n / (2 * np.pi)) ** 2, chunks=(6, 12, 24)
    )
    newest, _ = dask_p2p.iterate(
        wave, (u, before), [4, 0], steps, constants=(c2,)
    )
    result = newest.compute()

    np.testing.assert_allclose(result, standing(steps), atol=3e-6)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
