"""Ranks with local blocks on a GPU: data that goes through the host, and waits."""

from __future__ import annotations

import gc
import time
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from weakref import ref

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.utils import meta_from_array

from dask_p2p import estimate, iterate, spmd, tuning
from dask_p2p.backends import cupy as cupy_backend
from dask_p2p.config import options
from dask_p2p.errors import (
    BlockMismatchError,
    DeviceLostError,
    InputError,
    MemoryLimitError,
    P2PWarning,
    UnsupportedArrayError,
)
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections import Context
from dask_p2p.sections.gang.checkpoints import Checkpoints, SavedStates, States
from dask_p2p.sections.gpu import streams as gpu_streams
from dask_p2p.sections.gpu.device import Gpu, device_for
from dask_p2p.sections.gpu.streams import STEPS_AHEAD
from dask_p2p.sections.iterate import capture as overlap
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.sections.wire.endpoint import Reach
from tests.clock import START_S, Clock
from tests.sections.emulated import emulated_gpu, kernel, on_gpu, run_section
from tests.sections.gangs import run_gang
from tests.sections.iterate.test_iterate import X as LARGE
from tests.sections.iterate.test_iterate import reference, star, wave
from tests.simulation.streams import Array
from tests.support import tune
from tests.transports.loopback import wait_until

X = np.random.default_rng(0).normal(size=(8, 6))

STAGING = "p2p.transports.ipc.staging-bytes"


def array(gpu, x=X, chunks=(2, 3)):
    return on_gpu(gpu, da.from_array(x, chunks=chunks))


def by_sections(gpu, function, *xs, ranks=4, **kwargs):
    y = spmd(function, *(array(gpu, x) for x in xs), ranks=ranks, **kwargs)
    return run_section(gpu, y[0] if isinstance(y, tuple) else y, xs)


# --- whole sections


@pytest.mark.parametrize("ranks", [1, 4])
def test_levels_of_time_constants_and_keywords(gpu, ranks):
    speed = np.random.default_rng(1).random(X.shape)
    fields = array(gpu), array(gpu, X + 1)
    y = iterate(
        kernel(gpu, wave), fields, 2, 7, boundary=0.0, constants=(array(gpu, speed), 0.5),
        ranks=ranks, scale=0.1,
    )  # fmt: skip
    got = run_section(gpu, y[0], [X, X + 1, speed])
    wanted = reference(wave, [X, X + 1], 2, 7, 0.0, (speed, 0.5), scale=0.1)
    assert all(map(np.array_equal, got, wanted))


@pytest.mark.parametrize("ranks", [1, 4])
def test_until_gets_numbers_of_the_host(gpu, ranks):
    """Sums of arrays that the function leaves on the device."""
    seen = []

    def halved(u, out):
        out[:] = u / 2
        return (out**2).sum()

    def on_device(u, out):
        run(u, out=out)
        return out.made(lambda values: (values**2).sum())

    def small(size):
        seen.append(type(size))
        return size < 1e-3

    run = kernel(gpu, halved)
    (got,) = run_section(gpu, iterate(on_device, array(gpu), 0, 50, until=small, ranks=ranks), [X])
    ratio = got / X
    assert np.allclose(ratio, ratio[0, 0])
    assert 2**-50 < ratio[0, 0] < 2**-5
    assert set(seen) == {np.float64}


def test_what_is_not_filled_is_named(gpu):
    def misses_a_row(u, out):
        out[1:] = u[1:]

    y = iterate(kernel(gpu, misses_a_row), array(gpu), 0, 3, ranks=1)
    with pytest.raises(BlockMismatchError, match="left 6 of 48 elements as they were"):
        run_section(gpu, y, [X])


@pytest.mark.parametrize("returned", [np.ones((8, 6)), None, 3])
def test_what_is_no_array_of_the_device(gpu, returned):
    with pytest.raises(
        BlockMismatchError, match=r"from the function.*, got .*(numpy\.|builtins\.)"
    ):
        by_sections(gpu, lambda ctx, x: returned, X, ranks=1)
    with pytest.raises(BlockMismatchError, match=r"from the function, got (numpy\.|builtins\.)"):
        run_section(gpu, iterate(lambda u: returned, array(gpu), 0, 1, ranks=1), [X])


def test_auto_hides_halos_of_other_ranks(gpu, monkeypatch):
    """But not for small local blocks: the function is called three times in a step."""
    # The emulated kernel records its calls. The second step computes the whole block, too.
    monkeypatch.setattr(overlap, "is_replayable", lambda function: True)
    calls = []

    def counted(u, out):
        calls.append(out.shape)
        out[:] = u[1:-1, 1:-1]

    counts = (1, 0, 3), (2, LARGE.nbytes, 2 * 3), (2, 0, 2 * (1 + 1 + 2 * 3))
    for ranks, least_bytes, count in counts:
        tune(monkeypatch, gpu_overlap_bytes=least_bytes)
        calls.clear()
        y = iterate(kernel(gpu, counted), array(gpu, LARGE, (12, 30)), 1, 3, ranks=ranks)
        run_section(gpu, y, [LARGE])
        assert len(calls) == count
    assert {*calls} == {(12, 30), (10, 30), (1, 30)}


def without_mean(u):
    return u.made(lambda values: values - values.mean())


def halved_again(u):
    return u.made(lambda values: values / 2)


def test_results_that_depend_on_the_number_of_ranks_are_named(gpu, recwarn):
    def made(function, ranks):
        x = array(gpu, LARGE, (12, 30))
        return run_section(gpu, iterate(function, x, 1, 4, ranks=ranks), [LARGE])[0]

    with pytest.warns(P2PWarning, match="without_mean returns other values for halves"):
        assert not np.allclose(made(without_mean, 2), made(without_mean, 1))
    recwarn.clear()
    assert np.array_equal(made(halved_again, 2), LARGE / 16)
    assert not [*recwarn]


# --- through the host


def test_collectives(gpu):
    def function(ctx, x):
        total = ctx.allreduce(x)
        assert isinstance(total, Array)
        count = ctx.allreduce(x.made(np.sum))
        assert isinstance(count, np.float64)
        assert isinstance(ctx.allreduce(np.ones(2)), np.ndarray)
        found = ctx.allgather(x.made(np.max))
        assert isinstance(found, Array)
        assert found.get().max() == X.max()
        assert ctx.broadcast(x, root=2).get().shape == x.shape
        return x.made(lambda values: values * 0 + count)

    (got,) = by_sections(gpu, function, X)
    assert np.allclose(got, X.sum())


def test_redistribute_and_transforms(gpu, monkeypatch):
    library = ModuleType("cupyx.scipy.fft")
    for name in ("fftn", "ifftn", "rfft", "irfft"):

        def run(block, *args, overwrite_x=False, name=name, norm=None):
            return block.made(lambda values: getattr(np.fft, name)(values, *args, norm=norm))

        setattr(library, name, run)
    from dask_p2p.ops.fft import local as local_fft

    monkeypatch.setattr(local_fft, "_fft_module", lambda names: library)

    def function(ctx, x):
        turned = ctx.redistribute(x, partition=(0,), axes=(1, 0))
        assert turned.get().shape[1] == 8
        back = ctx.redistribute(turned, from_partition=(0,), axes=(1, 0), out=x.copy())
        assert np.array_equal(back.get(), x.get())
        waves = ctx.rfftn(x, partition=(1,))
        (k,) = ctx.wavenumbers(axes=(0,), partition=(1,), real=True)
        assert isinstance(k, Array)
        with pytest.raises(InputError, match=r"a: expected an array of cupy, .* got one of numpy"):
            ctx.redistribute(x.get())
        with pytest.raises(InputError, match="out: expected an array of shape"):
            ctx.redistribute(x, out=x.get())
        return ctx.irfftn(waves, from_partition=(1,))

    (got,) = by_sections(gpu, function, X, partition=(0,))
    assert np.allclose(got, X)


def test_values_of_ranks_are_numpys(gpu):
    y, most = spmd(lambda ctx, x: (x, x.made(np.max)), array(gpu), per_rank=[0.0], ranks=1)
    assert type(meta_from_array(most)) is np.ndarray
    assert isinstance(meta_from_array(y), Array)


def test_states_are_copies_on_the_host_and_come_back(gpu):
    """The second attempt of a gang of two begins where the first one was saved."""
    ranks, saved = RankGrid(((4, 4),), (2,)), [SavedStates(), SavedStates()]

    def attempt(resume, steps):
        def checkpoints(rank, connections, device):
            states = States(saved[rank], "gang", resume, [0, 1], lambda: None)
            return Checkpoints(rank, ["a", "b"], connections, states, device)

        def function(ctx):
            with ctx.device.running([]):
                field = ctx.with_halo(gpu.written(np.arange(4.0)), {0: 1}, boundary="periodic")
                for _ in ctx.steps(steps, ctx.state(field=field), every=3):
                    field.inner[...] = field.inner.made(lambda values: values + 1)
                return ctx.progress.first, field.inner.copy().get()

        return run_gang(ranks, function, device=Gpu, checkpoints=checkpoints)

    assert attempt(None, 5)[0][0] == 0
    for first, values in attempt(3, 7):
        assert first == 3
        assert values.tolist() == [7, 8, 9, 10]


def test_the_host_is_not_far_ahead(gpu, monkeypatch):
    waits, original = [], Gpu.wait

    def wait(device):
        waits.append(device)
        original(device)

    monkeypatch.setattr(Gpu, "wait", wait)

    def counted(steps, body):
        waits.clear()
        body(steps)
        return len(waits)

    def iterated(steps):
        run_section(gpu, iterate(lambda u: u, array(gpu), 0, steps, ranks=1), [X])

    def looped(steps):
        def function(ctx, x):
            for _ in ctx.steps(steps):
                pass
            return x

        by_sections(gpu, function, X, ranks=1)

    for body in (iterated, looped):
        few = counted(STEPS_AHEAD - 1, body)
        assert counted(3 * STEPS_AHEAD, body) == few + 3


def test_the_host_is_not_far_ahead_of_long_steps(gpu, monkeypatch):
    """Queued work keeps memory of other ranks alive after the end of the attempt."""
    now_s, step_s, waited, device = [0.0], [0.1], [0], Gpu()

    def wait(device):
        now_s[0] += (step - waited[-1]) * step_s[0]
        waited.append(step)

    monkeypatch.setattr(Gpu, "wait", wait)
    monkeypatch.setattr(gpu_streams, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    for step in range(1, 201):
        if step == 100:
            step_s[0] = 0.0  # the host takes all the time
        device.keep_up(step)
    ahead = [late - early for early, late in pairwise(waited)]
    assert ahead[0] == STEPS_AHEAD
    assert ahead[1:-1] == [5] * (len(ahead) - 2), "half a second"
    assert ahead[-1] == STEPS_AHEAD


# --- failures


def test_arrays_of_two_kinds(gpu):
    x, y = array(gpu), da.from_array(X, chunks=(2, 3))
    for first, other, title in ((x, y, "NumPy"), (y, x, "CuPy")):
        match = rf"got an array of {title}: .* x.map_blocks\(cupy.as"
        with pytest.raises(UnsupportedArrayError, match=match):
            iterate(lambda u, v: u, (first, other), 0, 1)
        with pytest.raises(UnsupportedArrayError, match=match):
            spmd(lambda ctx, u, v: u, first, other)
        with pytest.raises(UnsupportedArrayError, match=f"got a constant of {title}"):
            iterate(lambda u, c: u, first, 0, 1, constants=(other,))
    with pytest.raises(UnsupportedArrayError, match=r"a constant of NumPy.* cupy.asarray\(x\)"):
        iterate(lambda u, c: u, x, 0, 1, constants=(np.ones(3),))
    iterate(lambda u, c: u, x, 0, 1, constants=(np.float64(2), 3, "c"))


def test_blocks_of_another_kind_than_declared(gpu):
    y = spmd(lambda ctx, x: x, da.from_array(X, chunks=-1).map_blocks(gpu.written, meta=X[:0, :0]))
    with pytest.raises(InputError, match=r"block .*: expected an array of numpy, .*cupy.asnumpy"):
        y.compute(scheduler="sync")


def test_what_does_not_fit_into_the_gpu_is_refused(gpu, monkeypatch):
    y = iterate(kernel(gpu, star), array(gpu), 1, 2, ranks=1)
    found = estimate(y)
    monkeypatch.setattr(cupy_backend, "_total_bytes", lambda device: found.total_bytes - 1)
    with pytest.raises(MemoryLimitError, match=r"fits into .* of the GPU of this process"):
        run_section(gpu, y, [X])
    monkeypatch.setattr(cupy_backend, "_total_bytes", lambda device: found.total_bytes)
    run_section(gpu, y, [X])


@pytest.mark.parametrize(
    ("staging", "order", "part_bytes", "has_windows"),
    [("384 KiB", "auto", 2**17, True), ("0 B", "auto", 0, True), ("0 B", ["comm"], 0, False)],
)
def test_options_for_reading(staging, order, part_bytes, has_windows):
    with dask.config.set({"p2p.transports.order": order, STAGING: staging}):
        device = device_for("cupy", options())
    assert (device.part_bytes, device.has_windows) == (part_bytes, has_windows)


def test_a_gpu_that_waits_for_a_lost_rank(gpu, monkeypatch):
    """Its wait cannot be cancelled: the process has to end."""
    tune(monkeypatch, lost_gpu_s=0.05)
    connections = SimpleNamespace(has_ended=False, is_alone=True)
    device = Gpu(connections)
    found, waited = iter([600, 600, 0]), []

    def run():
        with device.running([]):
            gpu.cupy.cuda.runtime.streamQuery = lambda stream: next(found)
            device.wait()  # for a long kernel, in an attempt that continues
            waited.append(device)
            connections.has_ended = True
            gpu.cupy.cuda.runtime.streamQuery = lambda stream: 600

    with pytest.raises(DeviceLostError, match=r"has waited 0\.05 s for a lost rank"):
        run()
    assert waited
    gpu.cupy.cuda.runtime.streamQuery = lambda stream: 0
    with (other := Gpu()).running([]):
        assert other.stream is not device.stream, "which no other device uses"


class StartedByHand:
    """A thread that the test runs itself."""

    def __init__(self, started, target, args, daemon):
        assert daemon
        self.start = lambda: started.append(partial(target, *args))


def test_windows_of_an_attempt_that_failed_stay_a_while(gpu, monkeypatch):
    clock, later, device = Clock(), [], Gpu()
    monkeypatch.setattr(gpu_streams, "time", clock)
    monkeypatch.setattr(
        gpu_streams,
        "threading",
        SimpleNamespace(Thread=lambda **made: StartedByHand(later, **made)),
    )
    device.exported.append(memory := gpu.empty((100,), "f8"))
    used = gpu.live_bytes
    del memory
    device.let_go(is_orderly=False)
    assert gpu.live_bytes == used
    (run,) = later
    run()
    assert clock.now_s - START_S == pytest.approx(
        tuning.current.window_linger_s, abs=2 * gpu_streams._LOOK_S
    )
    assert gpu.live_bytes < used
    device.exported.append(gpu.empty((100,), "f8"))
    device.let_go(is_orderly=True)
    assert gpu.live_bytes < used


@pytest.mark.parametrize("ended", [(True, True), (True, False)])
def test_windows_of_an_attempt_go_with_the_last_process_that_read_them(gpu, ended):
    """The next attempt may need their memory."""
    device = Gpu()
    device.peers.extend(SimpleNamespace(has_ended=each) for each in ended)
    device.exported.append(gpu.empty((100,), "f8"))
    used = gpu.live_bytes
    device.let_go(is_orderly=False)
    if not all(ended):
        time.sleep(3 * gpu_streams._LOOK_S)
        assert gpu.live_bytes == used
        device.peers[1].has_ended = True
    wait_until(lambda: gpu.live_bytes < used)


def test_connections_show_that_they_have_ended():
    connections = Connections(Reach())
    assert not connections.has_ended
    connections.wake()
    assert connections.has_ended
    connections.close()


def test_memory_on_the_gpu_and_on_the_host(gpu):
    """Two ranks of 4 x 6 elements, with halos of a row at each boundary of blocks."""
    given = {"depth": {0: 1}, "steps": 2, "ranks": 2}
    found, host = (
        estimate(iterate(lambda u: u, x, **given))
        for x in (array(gpu), da.from_array(X, chunks=(2, 3)))
    )
    assert (found.kind, host.kind) == ("cupy", "numpy")
    assert found.step_bytes == host.step_bytes == 2 * 6 * 8
    assert found.packed_bytes == 2 * host.packed_bytes == 2 * found.step_bytes
    assert found.host_bytes == found.state_bytes + found.staging_bytes + found.packed_bytes
    assert host.host_bytes == host.total_bytes
    in_background = (
        found.packed_bytes - host.packed_bytes + found.checkpoint_bytes - host.state_bytes
    )
    assert found.total_bytes == host.total_bytes + in_background
    assert "checkpoints on the host" in str(found)


def test_streams_outlive_memory_of_a_function_that_raised(monkeypatch):
    """RMM frees memory on its stream. The garbage collector could drop the stream before."""
    runtime, queues = emulated_gpu(monkeypatch).cupy.cuda.runtime, []

    def work(error=None, query=lambda stream: 0):
        device = Gpu()
        with device.running([]):
            queues.append(ref(device.queue))
            runtime.streamQuery = query
            if error is not None:
                raise error

    def lost(stream):
        raise ValueError("the GPU is lost")

    with pytest.raises(ValueError, match="no more"):
        work(ValueError("no more"))
    with pytest.raises(ValueError, match="the GPU is lost"):
        work(query=lost)
    work()
    gc.collect()
    of_first, of_second, of_third = (queue() for queue in queues)
    assert of_first is of_second, "with its streams"
    assert None not in (of_second, of_third)
    assert of_third is not of_second, "no device gets its streams any more"


def test_functions_that_return_local_blocks(gpu):
    (got,) = run_section(
        gpu, iterate(lambda u: u.made(lambda values: 2 * values), array(gpu), 1, 3, ranks=4), [X]
    )
    assert np.array_equal(got, 8 * X)


def test_outputs_are_done_when_they_leave(gpu):
    """Their readers wait for no stream."""
    (got,) = by_sections(gpu, lambda ctx, x: x.made(lambda values: 3 * values), X)
    assert np.array_equal(got, 3 * X)
    gc.collect()
    gpu.check()


def test_the_function_runs_on_a_stream_of_the_rank(gpu):
    names, queues = [], []

    def function(ctx, x):
        names.append(gpu.current[-1].name)
        queues.append(ctx.device.queue)
        ctx.barrier()
        return x

    by_sections(gpu, function, X)
    assert len({*names, "null"}) == 5
    by_sections(gpu, function, X)
    assert {*names[4:]} == {*names[:4]}, "a pool keeps memory for each"
    assert {*queues[4:]} == {*queues[:4]}, "which have streams, too"


def test_local_blocks_of_another_kind(gpu):
    ctx = Context(RankGrid(((4,),), (1,)), device=Gpu())
    with (
        ctx.device.running([]),
        pytest.raises(InputError, match=r"local: .* cupy.asarray\(local\)"),
    ):
        ctx.with_halo(np.ones(4))
