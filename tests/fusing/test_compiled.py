import warnings

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.errors import InputError, P2PWarning, UnsupportedArrayError
from tests.fusing.programs import PROGRAMS, array, check_compiled, same_bits
from tests.fusing.support import generated, integers, smoothed
from tests.support import mostly_slow

CLUSTER = {"n_workers": 2}


def step(u):
    u = smoothed(u, 3)
    return u / abs(u).max()


@pytest.mark.parametrize("program", mostly_slow(PROGRAMS, PROGRAMS[:2]))
def test_values_are_those_of_the_function(client, program):
    check_compiled(client, program)


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


def products(u, v):
    return integers(u).T @ integers(v) + u


def test_other_arrays_that_the_function_reads(client):
    noise = da.map_blocks(generated, (48, 48), 3, chunks=((6,) * 8, (48,)), dtype=float)
    on_workers = client.persist(array())
    for operand in (noise, on_workers, array()):
        compiled = dask_p2p.compile(lambda u: products(u, operand), array())  # noqa: B023
        x = array() * 2
        for _ in range(2):
            assert same_bits(compiled(x).compute(), products(x, operand).compute())


def test_other_arguments_than_the_examples():
    compiled = dask_p2p.compile(step, array())
    with pytest.raises(InputError, match="expected 1 arrays, as in compile, got 0"):
        compiled()
    with pytest.raises(InputError, match="expected 1 arrays, as in compile, got 2"):
        compiled(array(), array())
    with pytest.raises(InputError, match="argument 0: expected the chunks of the example"):
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
    with pytest.raises(
        InputError, match=r"lazy arrays only, .* its argument 'r', .* between calls"
    ):
        dask_p2p.compile(lambda u, r: u / float(r.sum()), x, x)
    with pytest.raises(InputError, match="compute_chunk_sizes"):
        dask_p2p.compile(step, x[x > 0])
    with pytest.raises(UnsupportedArrayError, match="stays with Dask"):
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
    with pytest.raises(UnsupportedArrayError, match=r"the task .* of a delayed function, or of"):
        dask_p2p.compile(function, x)
    by_position = dask_p2p.compile(lambda x: x.map_blocks(np.multiply, x.sum(), dtype=float), x)
    assert (by_position(x).compute(scheduler="sync") == 24).all()


def cooled(block, dt=1.0):
    return block - dt * np.roll(block, 1, 0)


def with_noise(block, seed, block_info=None):
    place = block_info[0]["chunk-location"]
    return block + np.random.default_rng([int(seed), *place]).normal(size=block.shape)


#: Functions of an array and a number, as one writes them.
OF_NUMBERS = {
    "factor": lambda u, t: u + t * dask_p2p.transpose(u),
    "forcing": lambda u, t: u + da.sin(3 * t) * u.T.rechunk(u.chunks),
    "numpy": lambda u, t: np.exp(-t) * u[::-1],
    "by position": lambda u, t: u.map_blocks(cooled, t, dtype=u.dtype).T.rechunk(u.chunks),
    "by keyword": lambda u, t: u.map_blocks(cooled, dt=t * 2, dtype=u.dtype),
    "overlap": lambda u, t: dask_p2p.map_overlap(
        cooled, u, depth={0: 1}, boundary="periodic", dt=t, dtype=u.dtype
    ),
    "delayed": lambda u, t: u * da.from_delayed(dask.delayed(float)(t), (), float),
    "condition": lambda u, t: da.where(t > 1, u, -u),
    "alone": lambda u, t: u.T.sum() + t,
}


@pytest.mark.parametrize(
    "name", mostly_slow(OF_NUMBERS, ["factor", "by keyword", "overlap", "condition"])
)
def test_numbers_that_change_from_call_to_call(client, name):
    function, x = OF_NUMBERS[name], array()
    compiled = dask_p2p.compile(function, x, 0.0)
    numbers = (0.5, np.float32(1.25), np.array(2.0), 3)
    expected = [function(x, da.from_array(np.array(float(t)))).compute() for t in numbers]
    for t, values in zip(numbers, expected, strict=True):
        np.testing.assert_array_equal(compiled(x, t).compute(), values)
    assert compiled(x, 0.5).name == compiled(x, 0.5).name != compiled(x, 0.25).name
    with compiled.resident(x, 0.0) as run:
        handles = [run(x, t) for t in numbers]
        for handle, values in zip(handles, expected, strict=True):
            np.testing.assert_array_equal(run.fetch(handle), values)


def test_seeds_and_small_arrays_that_change(client):
    x = array()
    noisy = dask_p2p.compile(lambda u, k: da.map_blocks(with_noise, u, k, dtype=float), x, 0)
    expected = [da.map_blocks(with_noise, x, k, dtype=float).compute() for k in (1, 2, 2**62)]
    with noisy.resident(x, 0) as run:
        results = [run.fetch(run(x, k)) for k in (1, 2, 2**62)]
    for one, second in zip(results, expected, strict=True):
        assert same_bits(one, second)

    def scaled(u, factors, flag, phase):
        return da.where(flag, u * factors, u) * phase

    step = dask_p2p.compile(scaled, x, np.ones(48), True, 1j)
    for factors, flag, phase in (np.arange(48), False, 2), (np.arange(48) / 8, np.True_, 0.5j):
        results = step(x, factors, flag, phase).compute()
        assert same_bits(results, scaled(x, factors * 1.0, flag, complex(phase)).compute())


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_a_number_keeps_the_dtype_of_arrays(dtype):
    x = array().astype(dtype)
    step = dask_p2p.compile(lambda u, dt: u + dt * u.T.rechunk(u.chunks), x, 0.0)
    u = step(step(x, 0.5), np.float64(0.25))
    assert u.dtype == u.compute(scheduler="sync").dtype == x.dtype


def test_examples_of_one_block_take_values_and_results(client):
    """A step that returns the time step of the next one."""
    x, dt = array(), da.from_array(np.array(0.0))
    step = dask_p2p.compile(lambda u, dt: (u * (1 - dt), abs(u).max() / 8), x, dt)
    u = x.compute()
    assert same_bits(step(x, 0.5)[0].compute(), u * (1 - 0.5))
    with step.resident(x, 0.0) as run:
        v, dt = run(x, 0.5)
        v, dt = run(v, dt)
        v, dt = run(v, da.from_array(np.array(0.125)))
        results = run.fetch(v), run.fetch(dt)
    first = u * (1 - 0.5)
    second = first * (1 - abs(u).max() / 8)
    assert same_bits(results[0], second * (1 - 0.125))
    assert same_bits(results[1], abs(second).max() / 8)


def test_values_that_do_not_fit(client):
    x = array()
    step = dask_p2p.compile(lambda u, t, n: u * t + n, x, 0.0, 0)
    with step.resident(x, 0.0, 0) as run:
        for call in (step, run):
            with pytest.raises(InputError, match=r"argument 2: .* dtype of the example, int64"):
                call(x, 0.0, 1.5)
            with pytest.raises(InputError, match=r"argument 2: .* int64, got 1180"):
                call(x, 0.0, 2**70)
            with pytest.raises(InputError, match=r"argument 1: .* shape .* \(\), got \(2,\)"):
                call(x, np.ones(2), 0)
            with pytest.raises(InputError, match=r"argument 1: expected a number .* got str"):
                call(x, "0.0", 0)
        with pytest.raises(InputError, match=r"got Handle\. .* compile the function with a Dask"):
            run(x, run(x, 0.0, 0), 0)
    with pytest.raises(InputError, match=r"got Array\. .* compile the function with a Dask"):
        step(x, x.sum(), 0)
    with pytest.raises(UnsupportedArrayError, match="expected a Dask array, got"):
        dask_p2p.compile(lambda t: x * t, 0.0)
    for function in (
        lambda u, t: u * float(t),
        lambda u, t: u if t > 0 else -u,
        lambda u, t: sum(u for _ in range(t)),
    ):
        with pytest.raises(InputError, match="builds lazy arrays only"):
            dask_p2p.compile(function, x, 1)


def test_random_arrays_that_a_function_makes_are_named():
    x, rng = array(), da.random.default_rng(5)
    noise = rng.normal(size=x.shape, chunks=x.chunks)
    for function in (
        lambda u: u + rng.normal(size=u.shape, chunks=u.chunks),
        lambda u: u + da.random.default_rng(5).normal(size=u.shape, chunks=u.chunks),
        lambda u: (u.T, u * da.random.random(u.shape, chunks=u.chunks).sum()),
        lambda u: u + da.random.RandomState(3).normal(size=u.shape, chunks=u.chunks),
        lambda u: u + rng.choice([-1.0, 1.0], size=u.shape[1:], chunks=u.chunks[1]),
        lambda u: u + noise + rng.uniform(size=(1, 1)),
    ):
        with pytest.warns(P2PWarning, match=r"Pass the noise, or a seed, as an argument"):
            dask_p2p.compile(function, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", P2PWarning)
        dask_p2p.compile(lambda u: u + noise, x)
        compiled = dask_p2p.compile(np.add, x, noise)
    assert same_bits(compiled(x, noise).compute(), (x + noise).compute())
