"""A worker of a GPU is killed: the worker that replaces it gets as much memory, and work goes on.

Its nanny starts the new worker once. If the pool of the old one is still mapped anywhere, the new
pool does not fit, and the nanny gives up.
"""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

import dask_p2p
from dask_p2p import iterate, spmd
from dask_p2p.backends.device import close_ipc
from dask_p2p.sections.gpu.windows import LostEvents
from dask_p2p.tools.cluster import round_down
from dask_p2p.transports.process_memory import PROCESSES
from tests.backends.support import cupy
from tests.conftest import SHARING
from tests.faults.support import BOUND_S, addresses, wait_at
from tests.gpu.support import HeldKernel, gpu_client, on_gpu
from tests.gpu.test_sections import heat
from tests.gpu.test_streams import spin
from tests.sections.iterate.test_programs import reference
from tests.sections.support import nothing_is_left
from tests.support import result_of
from tests.transports.loopback import wait_until

pytestmark = pytest.mark.gpu(2)

POOL_FRACTION = 0.7  # of a GPU's memory: there is no room for two
STEPS, LONG = 30, 400
X = np.random.default_rng(0).normal(size=(256, 128))
CHUNKS = (128, 128)


@pytest.fixture
def pool(request):
    """Options of a pool that fits into a GPU's memory once."""
    share = 1 / SHARING if request.config.getoption("--share-gpu") else 1.0
    total_bytes = cupy.cuda.runtime.memGetInfo()[1]
    return {"rmm_pool_size": round_down(int(POOL_FRACTION * share * total_bytes))}


def by_turns(ctx, x):
    for _ in ctx.steps(STEPS):
        turned = ctx.redistribute(x, (1,))
        turned += 1
        ctx.redistribute(turned, from_partition=(1,), out=x)
    return x


def of_iterate(x, **kwargs):
    return iterate(heat, x, 1, STEPS, **kwargs)


WORK = {
    "iterate": of_iterate,
    "captured": partial(of_iterate, capture=True),
    "redistribute": partial(spmd, by_turns),
    "transpose": dask_p2p.transpose,
}


def wanted_of(kind):
    if kind == "redistribute":
        return X + STEPS
    return X.T if kind == "transpose" else reference(heat, [X], 1, STEPS, "periodic")[0]


def do(client, kind):
    """Do some work on both GPUs, check it, and leave nothing of it."""
    x = client.persist(on_gpu(X, CHUNKS))
    y = WORK[kind](x)
    y = y.map_blocks(lambda block: block.get(), dtype=y.dtype, meta=np.empty((0, 0)))
    actual = result_of(client, client.compute(y), timeout_s=120)
    np.testing.assert_allclose(actual, wanted_of(kind), rtol=1e-11, atol=1e-11)


def wait_for_another(client, gone):
    wait_until(lambda: len(now := addresses(client)) == 2 and gone not in now, BOUND_S)


def replace_one(client):
    """Kill a worker, and wait for another one."""
    victim, pid = min(client.run(os.getpid).items())
    os.kill(pid, signal.SIGKILL)
    wait_for_another(client, victim)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "iterate"),
        ("iterate", "iterate"),
        ("captured", "captured"),
        ("redistribute", "redistribute"),
        ("transpose", "iterate"),
        ("iterate", "transpose"),
    ],
)
def test_killed_between_two_kinds_of_work(pool, before, after):
    """Whatever has mapped its pool before."""
    with gpu_client(**pool) as client:
        for _ in range(2 if before else 0):
            do(client, before)
        replace_one(client)
        do(client, after)
        nothing_is_left(client)


def test_killed_again_and_again(pool):
    with gpu_client(**pool) as client:
        for _ in range(3):
            do(client, "iterate")
            do(client, "redistribute")
            replace_one(client)
        do(client, "iterate")


def die_once(path, after_s):
    """End this process later, if it has not been killed before."""
    try:
        with path.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def result_after_death(client, y, path, go_on=lambda: None):
    workers = {str(pid): address for address, pid in client.run(os.getpid).items()}
    y = y.map_blocks(lambda block: block.get(), dtype=y.dtype, meta=np.empty((0, 0)))
    future = client.compute(y)
    wait_until(lambda: path.exists() and path.read_text(), 60)
    gone = workers[path.read_text()]
    wait_until(lambda: gone not in addresses(client), 60)
    wait_for_another(client, gone)
    go_on()
    return result_of(client, future, timeout_s=200)


def slow_heat(u, out, path, ns, reads):
    """Puts work on the GPU far quicker than that does it."""
    import cupy

    spin(cupy.cuda.get_current_stream(), ns)
    heat(u, out)
    if reads:
        float(out.sum())  # the host waits, and only CUDA can wake it
    die_once(path, 0.5)


@pytest.mark.parametrize(
    ("ns", "options"),
    [
        (20_000_000, {}),
        (20_000_000, {"reads": True}),
        (200_000, {"capture": True}),
        (20_000_000, {"checkpoint_every": 10}),
        (0, {}),
    ],
    ids=str,
)
def test_killed_while_the_other_gpu_waits_for_it(pool, tmp_path, ns, options):
    """What it had still to do on its GPU is never done, and the other's streams wait for that."""
    path, steps = tmp_path / "died", LONG if ns != 200_000 else 10 * LONG
    options = {"reads": False, **options}
    with gpu_client(**pool) as client:
        y = iterate(slow_heat, on_gpu(X, CHUNKS), 1, steps, path=path, ns=ns, **options)
        actual = result_after_death(client, y, path)
        expected = reference(heat, [X], 1, steps, "periodic")[0]
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)
        del y
        nothing_is_left(client)


def turns_slowly(ctx, x, path):
    import cupy

    s = ctx.state(x=x)
    for _ in ctx.steps(100, s, every=20):
        spin(cupy.cuda.get_current_stream(), 20_000_000)
        turned = ctx.redistribute(s.x, (1,))
        turned += 1
        ctx.redistribute(turned, from_partition=(1,), out=s.x)
        if ctx.rank == 0:
            die_once(path, 0.5)
    return s.x


def test_killed_while_its_memory_is_read(pool, tmp_path):
    path = tmp_path / "died"
    with gpu_client(**pool) as client:
        y = spmd(turns_slowly, on_gpu(X, CHUNKS), path=path)
        np.testing.assert_allclose(result_after_death(client, y, path), X + 100, rtol=1e-12)
        del y
        nothing_is_left(client)


def waits_on_the_host(ctx, x, path, gate):
    """One rank ends when both have mapped each other's memory; the other one is slow."""
    p = ctx.with_halo(x, depth={0: 1}, boundary="periodic")
    ctx.update_halo(p)
    ctx.redistribute(x, (1,))
    if ctx.rank:
        if not os.path.exists(f"{gate}.open"):
            wait_at(gate)
    else:
        die_once(path, 0.5)
        if path.read_text() == str(os.getpid()):
            time.sleep(BOUND_S)
    ctx.update_halo(p)
    return p.inner


def test_killed_while_the_other_does_something_else(pool, gate, tmp_path):
    """It finds out at its next exchange, which may be long after."""
    path = tmp_path / "died"
    with gpu_client(**pool) as client:
        y = spmd(waits_on_the_host, on_gpu(X, CHUNKS), path=path, gate=gate.path)
        actual = result_after_death(client, y, path, gate.open)
        np.testing.assert_array_equal(actual, X)
        del y
        nothing_is_left(client)


# --- the driver's behaviour, with two processes


def hold(connection, seconds):
    """Be a process with memory, and with an event behind a kernel that takes long."""
    runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
    memory = cupy.cuda.Memory(2**21)
    event = cupy.cuda.Event(disable_timing=True, interprocess=True)
    spin(stream, int(seconds * 1e9))
    event.record(stream)
    of_event, of_memory = runtime.ipcGetEventHandle(event.ptr), runtime.ipcGetMemHandle(memory.ptr)
    connection.send((bytes(of_event), bytes(of_memory)))
    connection.recv()


@contextmanager
def child(target, *args):
    """A process that has one end of a pipe, and the first object that it sends."""
    context = multiprocessing.get_context("spawn")
    connection, child_end = context.Pipe()
    process = context.Process(target=target, args=(child_end, *args))
    process.start()
    try:
        assert connection.poll(120), "nothing comes"
        yield process, connection.recv()
    finally:
        process.kill()
        process.join(30)


@pytest.mark.gpu(1)
def test_closing_a_mapping_does_not_stop_other_threads():
    """It waits for the GPU, whose work may wait for something that another thread has to do."""
    runtime = cupy.cuda.runtime
    with child(hold, 0) as (_, (_, memory_handle)):
        address = runtime.ipcOpenMemHandle(memory_handle)
        stream = cupy.cuda.Stream(non_blocking=True)
        kernel = HeldKernel(stream)
        closing = threading.Thread(target=close_ipc, args=(address,))
        closing.start()
        closing.join(1)  # it may wait by now
        kernel.release()
        closing.join()
        stream.synchronize()
        assert kernel.was_let_go


def wait_for_lost(connection, count):
    """Be a process whose streams wait for an event of a process that is killed; send the end.

    Some drivers (580.159) never end these waits, so this process does not return from this.
    """
    runtime = cupy.cuda.runtime
    with child(hold, 60) as (process, (event_handle, _)):
        event = runtime.ipcOpenEventHandle(event_handle)
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]
        for stream in streams:
            runtime.streamWaitEvent(stream.ptr, event)
        assert all(runtime.streamQuery(stream.ptr) for stream in streams), "it has not happened"
        PROCESSES.watch(name := f"holder-{process.pid}", process.pid)
        process.kill()
        wait_until(lambda: PROCESSES.has_ended(name), 30)
        lost = LostEvents(cupy.cuda, runtime.getDevice(), [event])

        def have_ended():
            return not any(runtime.streamQuery(stream.ptr) for stream in streams)

        wait_until(lambda: have_ended() or lost.are_waited_for, 30)
        connection.send("the waits have ended" if have_ended() else "the waits are known")
        os._exit(0)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("count", [1, 12])
def test_waits_for_an_event_of_a_killed_process_end_or_are_known(count):
    """Also if more streams wait than a GPU has queues. A rank with known waits leaves.

    These are the last tests here: the kernel of the killed process may occupy the GPU for a minute.
    """
    with child(wait_for_lost, count) as (_, reply):
        assert reply in ("the waits have ended", "the waits are known")
