"""Conjugate gradients: sums of all ranks, checkpoints, an early end."""

import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p


def solve(ctx, b, tolerance):
    start = ctx.allreduce(np.vdot(b, b))
    s = ctx.state(x=np.zeros_like(b), r=b, p=b, square=start)
    for _ in ctx.steps(1000, s):
        u = ctx.pad(s.p, depth=1, boundary=0.0)
        ap = 4 * s.p - u[:-2, 1:-1] - u[2:, 1:-1]
        ap -= u[1:-1, :-2] + u[1:-1, 2:]
        alpha = s.square / ctx.allreduce(np.vdot(s.p, ap))
        s.x += alpha * s.p
        s.r -= alpha * ap
        new = ctx.allreduce(np.vdot(s.r, s.r))
        if new < tolerance**2 * start:
            return s.x
        s.p = s.r + new / s.square * s.p
        s.square = new
    raise ArithmeticError("it does not converge")


def main():
    """Run it, and compare it with a known result."""
    n = 40
    b = np.random.default_rng(0).normal(size=(n, n))
    x = da.from_array(b, chunks=(10, 20))
    result = dask_p2p.spmd(solve, x, tolerance=1e-10).compute()

    u = np.pad(result, 1)
    ax = (
        4 * result
        - u[:-2, 1:-1]
        - u[2:, 1:-1]
        - u[1:-1, :-2]
        - u[1:-1, 2:]
    )
    np.testing.assert_allclose(ax, b, atol=1e-8)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
