"""Fused graphs and resident gangs of CuPy blocks: values are those of NumPy."""

import signal

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p import tuning
from tests.fusing import programs
from tests.gpu.support import on_gpu, on_host
from tests.sections.support import nothing_is_left
from tests.support import die_once, persisted, tune_here

pytestmark = pytest.mark.gpu(2)

X = np.random.default_rng(0).normal(size=(96, 96))
UNEVEN = ((13, 40, 7, 36), (43, 53))
LARGE = np.random.default_rng(1).normal(size=(2048, 2048))


def overlaps(x):
    for number in range(8):
        boundary = ("periodic", "reflect", "nearest", 0.5)[number % 4]
        x = dask_p2p.map_overlap(smooth_of, x, 1 + number % 2, boundary, dtype=x.dtype)
    return x


def smooth_of(block):
    """The function of the programs for blocks of both libraries."""
    return block + (block[:1] * 0 + block.take(range(-1, len(block) - 1), 0)) * 0.3


def transposes(x):
    y = dask_p2p.transpose(x) + x
    return dask_p2p.rechunk(y, (-1, 16)).T - dask_p2p.rechunk(x, (16, -1))


def elementwise(x):
    return da.where(x > 0, x, x.T) / (1 + abs(x).sum()) - x.mean(axis=0)


def doubled(block):
    """Overwrites its argument, if that is of the GPU: the expected values are computed before."""
    if type(block).__module__.startswith("numpy"):
        return block * 2 + 1
    block *= 2
    return block + 1


def overwriting(x):
    y = x.map_blocks(doubled, dtype=x.dtype)
    return y + dask_p2p.transpose(y).map_blocks(doubled, dtype=x.dtype) - x


def transforms(x):
    return dask_p2p.fft.ifftn(dask_p2p.fft.fftn(x) * 0.5).real + x


PROGRAMS = {
    "overlaps": overlaps,
    "transposes": transposes,
    "elementwise": elementwise,
    "overwriting": overwriting,
    "transforms": transforms,
    "rechunks": programs.rechunks,
    "rechunks of Dask": programs.rechunks_of_dask,
}


@pytest.fixture(params=["ipc", "comm"])
def way(request):
    """Ranks read each other's memory, or send messages through the host."""
    order = ["ipc", "comm"] if request.param == "ipc" else ["comm"]
    with dask.config.set({"p2p.transports.order": order}):
        yield request.param


def check(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())


def expected(program, x, chunks):
    return program(da.from_array(x, chunks=chunks)).compute(scheduler="sync")


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("size", ["small", "large"])
def test_programs(client, way, name, size):
    x, chunks = (X, UNEVEN) if size == "small" else (LARGE, (512, -1))
    if name == "rechunks of Dask":  # of small blocks
        x = x[:512, :512]
    x_on_gpu = persisted(client, on_gpu(x, chunks))
    reference = expected(PROGRAMS[name], x, chunks)
    y = PROGRAMS[name](x_on_gpu)
    check(on_host(dask_p2p.fused(y)), reference)
    for mode in ("on", "auto"):
        with dask.config.set({"p2p.fuse": mode}):
            check(on_host(y), reference)
    step = dask_p2p.compile(PROGRAMS[name], x_on_gpu)
    for _ in range(2):
        check(on_host(step(x_on_gpu)), reference)
    np.testing.assert_array_equal(on_host(x_on_gpu), x)
    nothing_is_left(client)


def test_blocks_that_are_made_on_the_host(client, way):
    x = da.from_array(X, chunks=UNEVEN)
    y = overlaps(on_gpu(X, UNEVEN)).map_blocks(lambda block: block.get(), meta=np.empty((0, 0)))
    check((dask_p2p.fused(y) + x).compute(), expected(overlaps, X, UNEVEN) + X)


def test_late_kernels(client, way):
    """Exchanges and outputs wait for the work of GPUs, which lasts for long here."""

    def late(block):
        import cupy

        from tests.gpu.test_streams import spin

        spin(cupy.cuda.get_current_stream(), 50_000_000)
        return block + 1

    def program(x, function):
        for _ in range(4):
            x = dask_p2p.transpose(x.map_blocks(function, dtype=x.dtype))
        return x

    x = persisted(client, on_gpu(X, (48, -1)))
    reference = expected(lambda x: program(x, lambda block: block + 1), X, (48, -1))
    check(on_host(dask_p2p.fused(program(x, late))), reference)


def test_a_worker_is_killed(client, way, tmp_path):
    def dies_once(block):
        die_once(tmp_path / "died")
        return block + 1

    def program(x, function):
        y = overlaps(x)
        return overlaps(y.map_blocks(function, dtype=x.dtype, meta=x._meta))

    reference = expected(lambda x: program(x, lambda block: block + 1), X, UNEVEN)
    check(on_host(dask_p2p.fused(program(on_gpu(X, UNEVEN), dies_once))), reference)
    client.wait_for_workers(2, timeout=120)


def heat(u):
    return dask_p2p.map_overlap(smooth_of, u * 0.7, {0: 1}, "periodic", dtype=u.dtype)


def test_a_resident_gang(client, way):
    x = persisted(client, on_gpu(X, (48, -1)))
    step = dask_p2p.compile(lambda u: (heat(u), u.sum()), x)
    reference = X
    with step.resident(x) as run:
        u = x
        for _ in range(50):
            u, total = run(u)
            last, reference = reference, expected(heat, reference, (48, -1))
        check(np.asarray(to_host(run.fetch(u))), reference)
        assert abs(float(to_host(run.fetch(total))) - last.sum()) < 1e-9
        check(on_host(run.array(u)), reference)
    np.testing.assert_array_equal(on_host(x), X)


def check_killed(client, at, steps):
    """Check the values of a resident gang, one of whose workers is killed after a step."""
    x = persisted(client, on_gpu(X, (48, -1)))
    reference = X
    with dask_p2p.compile(heat, x).resident(x) as run:
        u = x
        for number in range(steps):
            u, reference = run(u), expected(heat, reference, (48, -1))
            if number == at:
                run.fetch(u)
                victim = run._streams.ranks[number % 2][0]
                client.run(signal.raise_signal, signal.SIGKILL, workers=[victim], on_error="ignore")
        check(np.asarray(to_host(run.fetch(u))), reference)
    client.wait_for_workers(2, timeout=120)


def test_a_resident_gang_and_a_killed_worker(client, way):
    check_killed(client, 20, 40)


def normed(u):
    return u / da.sqrt((u * u).sum())


def turned(u):
    return dask_p2p.transpose(dask_p2p.transpose(u) * 0.5)


def transformed(u):
    return dask_p2p.fft.ifftn(dask_p2p.fft.fftn(u) * 0.5).real


@pytest.fixture
def gangs(client):
    """Return a function that sets the number of calls before GPUs replay them."""

    def replay_after(calls):
        client.run(tune_here, replay_after_calls=calls)

    yield replay_after
    replay_after(tuning.current.replay_after_calls)


@pytest.mark.parametrize("function", [heat, overlaps, transposes, normed, turned, transformed])
def test_replayed_calls_are_those_of_functions(client, gangs, function):
    x = persisted(client, on_gpu(X, (48, -1)))
    step = dask_p2p.compile(lambda u: function(u).rechunk((48, -1)), x)
    replays = []
    for first in (10**9, 4):
        gangs(first)
        with step.resident(x) as run:
            u = x
            for _ in range(12):
                u = run(u)
            replays.append(to_host(run.fetch(u)))
    assert np.array_equal(*replays)


def adds_noise(block):
    if isinstance(block, np.ndarray):
        return block
    import cupy

    return block + cupy.random.random(block.shape)


def test_random_numbers_are_not_replayed(client, gangs):
    gangs(4)
    x = persisted(client, on_gpu(X * 0, (48, -1)))
    step = dask_p2p.compile(lambda u: u.map_blocks(adds_noise, dtype=u.dtype, meta=u._meta), x)
    with step.resident(x) as run:
        draws = [to_host(run.fetch(run(x))) for _ in range(20)]
    for number, draw in enumerate(draws):
        assert not any(np.array_equal(draw, earlier) for earlier in draws[:number])


@pytest.mark.parametrize("neighbour", ["layers", "iterate"])
def test_replayed_calls_beside_other_work(client, gangs, neighbour):
    """Arguments of earlier calls, other gangs and tasks on the same GPUs, results that are kept."""
    gangs(4)
    x = persisted(client, on_gpu(X, (48, -1)))
    big = persisted(client, on_gpu(LARGE, (1024, -1)))
    reference = [X]
    for _ in range(60):
        reference.append(expected(heat, reference[-1], (48, -1)))
    with dask_p2p.compile(heat, x).resident(x) as run:
        handles = [x]
        for number in range(60):
            handles.append(run(handles[-1]))
            if number % 20 == 10:
                if neighbour == "layers":
                    check(on_host(dask_p2p.transpose(big)), LARGE.T)
                else:
                    y = dask_p2p.iterate(lambda u: u[1:-1, 1:-1] * 1.0, big, 1, 5)  # periodic
                    check(on_host(y), LARGE)
        again = run(handles[30])
        for number in (1, 20, 40, 60):
            check(np.asarray(to_host(run.fetch(handles[number]))), reference[number])
        check(np.asarray(to_host(run.fetch(again))), reference[31])


@pytest.mark.parametrize("at", [30, 45])
def test_a_worker_is_killed_while_calls_are_replayed(client, gangs, at):
    gangs(4)
    check_killed(client, at, 60)


def to_host(value):
    return value.get() if hasattr(value, "get") else value
