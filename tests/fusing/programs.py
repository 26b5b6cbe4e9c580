"""Ordinary programs, as one first writes them."""

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait

import dask_p2p
from tests.fusing.support import generated, integers, smooth
from tests.sections.support import nothing_is_left


def array(n=48, rows=6):
    return da.from_array(np.random.default_rng(0).normal(size=(n, n)), chunks=(rows, n))


def stencils(x):
    for number in range(6):
        boundary = ("periodic", "reflect", "none")[number % 3]
        x = da.map_overlap(smooth, x, depth={0: 1}, boundary=boundary, dtype=x.dtype)
    return x


def transforms(x):
    waves = dask_p2p.fft.fftn(x) * np.linspace(0, 1, x.shape[1])
    return dask_p2p.fft.ifftn(waves).real


def rechunks(x):
    n = x.shape[0]
    y = dask_p2p.rechunk(x, (n // 3, -1)) + 1
    y = dask_p2p.rechunk(y, (-1, n // 4)) * 2
    return dask_p2p.rechunk(y, (n // 2, n // 2)) - x


def rechunks_of_dask(x):
    return (x.rechunk((-1, 6)).T + x).rechunk((12, 12)) * 2


def reductions(x):
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    return da.stack([x.sum(axis=1), abs(x).max(axis=1), x.var(axis=1), da.median(x, axis=1)])


def solver(x):
    """Some steps of conjugate gradients."""
    matrix = integers(x) @ integers(x).T + 9 * da.eye(len(x), chunks=x.chunksize[0])
    b = x[:, 0]
    y = da.zeros_like(b)
    r = p = b
    rr = (r * r).sum()
    for _ in range(3):
        q = (matrix * p).sum(axis=1)  # by NumPy, which adds in one order
        a = rr / (p * q).sum()
        y, r = y + a * p, r - a * q
        before, rr = rr, (r * r).sum()
        p = r + rr / before * p
    return y


def masks(x):
    return da.where(x > 0, x, x.T)[::-1, 1:].cumsum(axis=0) + x[x > 0].sum()


def labelled(x):
    xr = pytest.importorskip("xarray")
    a = xr.DataArray(x, dims=("time", "x"), coords={"season": ("time", np.arange(len(x)) % 4)})
    a = a.groupby("season") - a.groupby("season").mean()
    means = integers(a).weighted(abs(integers(a[0]))).mean("x")  # a product of matrices
    return (a.rolling(x=3).mean().fillna(0) * means).data


def of_functions(x):
    """Return an array whose blocks are also made by functions that stay with Dask."""
    noise = da.map_blocks(generated, x.shape, 3, chunks=x.chunks, dtype=float)
    return integers(noise + x).T @ integers(noise)


PROGRAMS = (
    stencils, transforms, rechunks, rechunks_of_dask, reductions, solver, masks, labelled,
    of_functions,
)  # fmt: skip


def same_bits(computed, expected):
    computed, expected = np.asarray(computed), np.asarray(expected)
    return (computed.dtype, computed.shape, computed.tobytes()) == (
        expected.dtype,
        expected.shape,
        expected.tobytes(),
    )


def check_compiled(client, program):
    """Compare the values of a compiled program with those of its function."""
    compiled = dask_p2p.compile(program, array())
    for x in (array() * 2, client.persist(array() - 1)):
        computed, expected = compiled(x), program(x)
        assert type(computed) is type(expected)
        assert (computed.chunks, computed.dtype) == (expected.chunks, expected.dtype)
        assert same_bits(computed.compute(), expected.compute())
    del x, computed, expected
    nothing_is_left(client)


def check_values(client, program, mode):
    """Compare the values of a program with those without the option."""
    x = array()
    expected = program(x).compute()
    inputs = client.persist(x)
    with dask.config.set({"p2p.fuse": mode}):
        computed = program(x).compute()
        on_workers = program(inputs).persist()
        wait(on_workers)
    assert same_bits(computed, expected)
    assert same_bits(on_workers.compute(), expected)
    del inputs, on_workers
    nothing_is_left(client)
