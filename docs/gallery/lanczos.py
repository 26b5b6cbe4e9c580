"""Eigenvalues by Lanczos' method: sums of ranks, a growing state."""

import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p
from dask_p2p import Same


def applied(u, potential):
    """Return the operator's product with `u`, which has a halo."""
    near = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    return (4 + potential) * u[1:-1, 1:-1] - near


def orthogonal(w, basis, total):
    """Return a vector without its part in the basis, and that part."""
    parts = np.zeros(len(basis))
    for _ in range(2):  # once projection, for the rounding
        projection = total(np.tensordot(basis, w, w.ndim))
        w = w - np.tensordot(projection, basis, 1)
        parts += projection
    return w, parts


def eigenvalues(diagonal, off_diagonal):
    """Return the eigenvalues of the small matrix."""
    sides = np.diag(off_diagonal[:-1], 1) + np.diag(
        off_diagonal[:-1], -1
    )
    return np.linalg.eigvalsh(np.diag(diagonal) + sides)


def solve(ctx, potential, start, count):
    s = ctx.state(basis=start[None], matrix=np.zeros((2, count)))
    for j in ctx.steps(count, s):
        if j == 0:
            norm = ctx.allreduce(np.vdot(start, start)) ** 0.5
            s.basis = s.basis / norm
        w = applied(ctx.pad(s.basis[-1], 1, 0.0), potential)
        w, parts = orthogonal(w, s.basis, ctx.allreduce)
        norm = ctx.allreduce(np.vdot(w, w)) ** 0.5
        s.matrix[:, j] = parts[-1], norm
        s.basis = np.concatenate([s.basis, w[None] / norm])
    return eigenvalues(*s.matrix)


def main(n=24, count=20, compare=True):
    """Run it, and compare it with the same program in NumPy."""
    draw = np.random.default_rng(0)
    potential, first = 5 * draw.random((n, n)), draw.normal(size=(n, n))
    lazy = dask_p2p.spmd(
        solve,
        da.from_array(potential, chunks=(n // 4, n // 2)),
        da.from_array(first, chunks=(n // 4, n // 2)),
        outputs=Same(np.zeros(count)),
        count=count,
    )
    result = lazy.compute()
    if compare:  # with the same in NumPy
        basis, matrix = (
            first[None] / np.linalg.norm(first),
            np.zeros((2, count)),
        )
        for j in range(count):
            w = applied(np.pad(basis[-1], 1), potential)
            w, parts = orthogonal(w, basis, lambda a: a)
            matrix[:, j] = parts[-1], np.linalg.norm(w)
            basis = np.concatenate([basis, w[None] / matrix[1, j]])
        np.testing.assert_allclose(
            result, eigenvalues(*matrix), rtol=1e-10
        )
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
