"""Many small systems: a batch of linear solves in each step."""

import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p


def square_roots(ctx, a, tolerance):
    s = ctx.state(x=np.broadcast_to(np.eye(a.shape[-1]), a.shape))
    for _ in ctx.steps(100, s):
        new = (s.x + np.linalg.solve(s.x, a)) / 2
        change = ctx.allreduce(
            np.abs(new - s.x).max(initial=0.0), "max"
        )
        s.x = new
        if change < tolerance:
            return s.x
    raise ArithmeticError("it does not converge")


def main():
    """Run it, and compare it with a known result."""
    m = np.random.default_rng(0).normal(size=(1000, 4, 4))
    a = m @ m.transpose(0, 2, 1) + np.eye(4)
    x = da.from_array(a, chunks=(125, 4, 4))
    result = dask_p2p.spmd(
        square_roots, x, partition=(0,), tolerance=1e-10
    ).compute()

    np.testing.assert_allclose(result @ result, a, atol=1e-8)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
