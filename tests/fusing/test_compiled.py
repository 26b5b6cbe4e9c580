from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait

import dask_p2p
from dask_p2p.errors import ChunksError, FuseError, InputError, UnsupportedArrayError
from tests.fusing.programs import PROGRAMS, array, same_bits
from tests.fusing.support import generated, smooth
from tests.sections.support import nothing_is_left
from tests.support import mostly_slow

CLUSTER = {"n_workers": 2}


def step(u):
    for _ in range(3):
        u = dask_p2p.map_overlap(smooth, u, depth={0: 1}, boundary="periodic", dtype=u.dtype)
    return u / abs(u).max()


@pytest.mark.parametrize("program", mostly_slow(PROGRAMS, PROGRAMS[:4]))
def test_values_are_those_of_the_function(client, program):
    compiled = dask_p2p.compile(program, array())
    for x in (array() * 2, client.persist(array() - 1)):
        got = compiled(x)
        expected = program(x)
        assert (got.chunks, got.dtype) == (expected.chunks, expected.dtype)
        assert same_bits(got.compute(), expected.compute())
    del x, got, expected
    nothing_is_left(client)


def test_a_function_is_called_once(client):
    calls = []

    def counted(u):
        calls.append(u)
        return step(u)

    compiled = dask_p2p.compile(counted, array())
    u = expected = array()
    for _ in range(4):
        u, expected = compiled(u), step(expected)
    assert same_bits(u.compute(), expected.compute())
    assert len(calls) == 1
    assert repr(compiled) == "<counted compiled for 2 ranks>"


def test_results_are_arguments_on_the_same_workers(client):
    compiled = dask_p2p.compile(step, array())
    u, holders = array(), []
    for _ in range(3):
        u = client.persist(compiled(u))
        wait(u)
        holders.append({key[1:]: who for key, who in client.who_has(u).items()})
    assert holders[0] == holders[1] == holders[2]


def test_several_arguments_and_results(client):
    def both(u, v):
        return u @ v, (u + v).sum(axis=0), u

    x, y = array(), array().T.rechunk((12, 12))
    compiled = dask_p2p.compile(both, x, y)
    got = compiled(x + 1, y)
    assert isinstance(got, tuple)
    for one, other in zip(dask.compute(*got), dask.compute(*both(x + 1, y)), strict=True):
        assert same_bits(one, other)
    same = compiled(x, x.T.rechunk((12, 12)))
    assert same_bits(same[1].compute(), both(x, x.T.rechunk((12, 12)))[1].compute())


def test_one_argument_given_twice(client):
    compiled = dask_p2p.compile(lambda u, v: u - v.T, array(), array())
    x = array()
    assert same_bits(compiled(x, x).compute(), (x - x.T).compute())


def test_other_arrays_that_the_function_reads(client):
    made = da.map_blocks(generated, (48, 48), 3, chunks=((6,) * 8, (48,)), dtype=float)
    on_workers = client.persist(array())
    for other in (made, on_workers, array()):
        compiled = dask_p2p.compile(lambda u: u.T @ other + u, array())  # noqa: B023
        x = array() * 2
        for _ in range(2):
            assert same_bits(compiled(x).compute(), (x.T @ other + x).compute())


def test_the_same_arguments_have_the_same_result():
    compiled = dask_p2p.compile(step, array())
    assert compiled(array()).name == compiled(array()).name
    assert compiled(array()).name != compiled(array() + 1).name
    assert compiled.ranks == 1
    assert same_bits(compiled(array()).compute(), step(array()).compute())


def test_other_arguments_than_the_examples():
    compiled = dask_p2p.compile(step, array())
    with pytest.raises(InputError, match="expected 1 arrays, as in compile, got 0"):
        compiled()
    with pytest.raises(InputError, match="expected 1 arrays, as in compile, got 2"):
        compiled(array(), array())
    with pytest.raises(ChunksError, match="argument 0: expected the chunks of the example"):
        compiled(array().rechunk(12))
    with pytest.raises(InputError, match=r"argument 0: expected the dtype .* float64, got float32"):
        compiled(array().astype("f4"))
    with pytest.raises(UnsupportedArrayError, match="from_array"):
        compiled(np.ones((48, 48)))


def test_functions_that_cannot_be_compiled(client):
    x = array()
    with pytest.raises(InputError, match="expected a function of Dask arrays"):
        dask_p2p.compile(x, x)
    with pytest.raises(InputError, match=r"at least one example, got none\. Call compile"):
        dask_p2p.compile(step)
    with pytest.raises(InputError, match=r"returns a Dask array .* got 3"):
        dask_p2p.compile(lambda u: 3, x)
    with pytest.raises(InputError, match="builds lazy arrays only"):
        dask_p2p.compile(lambda u: u / float(u.sum().compute()), x)
    with pytest.raises(ChunksError, match="compute_chunk_sizes"):
        dask_p2p.compile(step, x[x > 0])
    with pytest.raises(FuseError, match="stays with Dask"):
        dask_p2p.compile(lambda u: dask_p2p.spmd(lambda ctx, a: a * 2, u) + 1, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.map_blocks(lambda block, sums: block * sums, sums=x.sum(), dtype=float),
        lambda x: x * da.from_delayed(dask.delayed(np.sum)(x), (), float),
        lambda x: x * da.from_delayed(dask.delayed(np.sum)((x + 1).T), (), float),
    ],
)
def test_arguments_that_dask_has_optimised(function):
    """Dask copies their tasks into others. `compile` raises the error, not a call."""
    x = da.ones((4, 6), chunks=2)
    with pytest.raises(FuseError, match=r"got the task .* of a delayed function, or of"):
        dask_p2p.compile(function, x)
    by_position = dask_p2p.compile(lambda x: x.map_blocks(np.multiply, x.sum(), dtype=float), x)
    assert (by_position(x).compute(scheduler="sync") == 24).all()
