import asyncio
import gc
import multiprocessing
import os
import signal
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.backends.device import private_stream
from dask_p2p.errors import BlockMismatchError, Obstacle, TransferError, UnsupportedArrayError
from dask_p2p.transports.buffers import Buffers
from dask_p2p.transports.rpc import Background, check_reply, refuse
from dask_p2p.transports.ucx_messenger import Messenger, ucxx_obstacle
from tests.support import BOUND_S
from tests.transports.loopback import wait_until


@pytest.fixture
def pair():
    with closing(Messenger(None)) as one, closing(Messenger(None)) as second:
        yield one, second


def numbers(nbytes):
    return np.resize(np.arange(251, dtype="u1"), nbytes)


def test_a_message_that_nobody_takes(pair):
    sender, receiver = pair
    large = numbers(2**22)
    with pytest.raises(TransferError, match="within"):
        receiver.send(sender.address, large, 1).result(0.3)
    wait_until(lambda: receiver.in_flight == 0)
    # The same two can go on.
    target = np.zeros(2**22, "u1")
    received = sender.receive(target, 2)
    receiver.send(sender.address, large, 2).result(BOUND_S)
    received.result(BOUND_S)
    np.testing.assert_array_equal(target, large)


def test_closing_ends_what_is_on_its_way():
    messenger = Messenger(None)
    messages = [
        messenger.receive(np.zeros(10, "u1"), 1),
        messenger.send(messenger.address, numbers(2**22), 2),
    ]
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(message.result, BOUND_S) for message in messages]
        messenger.close()
        for result in waiting:
            with pytest.raises(TransferError, match=r"(?i)closing|cancel"):
                result.result(BOUND_S)
    with pytest.raises(TransferError, match="the worker is closing"):
        messenger.receive(np.zeros(10, "u1"), 1)
    with pytest.raises(TransferError, match="the worker is closing"):
        messenger.send(messenger.address, np.zeros(10, "u1"), 1)
    messenger.close()


@pytest.mark.parametrize("nbytes", [100, 2**20])
@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("first", ["who closed", "the other one"])
def test_an_endpoint_that_the_other_one_closed(pair, first, both_ways, nbytes):
    """Once that is known, messages arrive: whoever sends first, and whoever did before."""

    def exchange(sender, receiver, tag):
        target = np.zeros(nbytes, "u1")
        received = receiver.receive(target, tag)
        sender.reset_endpoint(receiver.address, receiver.count_closed(sender.address))
        sender.send(receiver.address, numbers(nbytes), tag).result(BOUND_S)
        received.result(BOUND_S)
        np.testing.assert_array_equal(target, numbers(nbytes))

    local, remote = pair
    start_s = time.monotonic()
    for tag in range(0, 60, 10):
        exchange(local, remote, tag)
        if both_ways:
            exchange(remote, local, tag + 1)
        local.forget(remote.address)
        ways = [(local, remote), (remote, local)]
        if both_ways:
            for number, way in enumerate(ways if first == "who closed" else ways[::-1]):
                exchange(*way, tag + 2 + number)
        elif first == "the other one" or tag % 20:
            exchange(remote, local, tag + 2)
            remote.forget(local.address)
            exchange(local, remote, tag + 3)
    assert time.monotonic() - start_s < 60


def test_an_older_word_about_endpoints_changes_nothing(pair):
    local, remote = pair
    local.send(remote.address, numbers(10), 1)
    local.reset_endpoint(remote.address, 2)  # the second, which here has not been yet
    assert remote.address not in local.endpoints
    local.send(remote.address, numbers(10), 2)
    for old in (0, 1, 2):
        local.reset_endpoint(remote.address, old)
    assert remote.address in local.endpoints
    assert local.count_closed(remote.address) == 2


def test_endpoints_to_processes_that_have_ended_are_dropped(pair):
    """Nobody else may know of the end of a process, and each new one has another address."""
    local, remote = pair
    ended, living = (SimpleNamespace(alive=alive) for alive in (False, True))
    local.endpoints |= {b"ended": ended, b"other": living}
    target = np.zeros(100, "u1")
    received = remote.receive(target, 7)
    local.send(remote.address, numbers(100), 7).result(BOUND_S)
    received.result(BOUND_S)
    assert local.endpoints.keys() == {b"other", remote.address}
    assert local.count_closed(b"ended") == 0
    del local.endpoints[b"other"]


def test_without_ucxx(monkeypatch):
    assert ucxx_obstacle() is None
    monkeypatch.setitem(sys.modules, "ucxx", None)
    assert ucxx_obstacle.__wrapped__().code == "not-installed"
    with pytest.raises(TransferError, match="UCX does not start: ModuleNotFoundError"):
        Messenger(None)


def run_messenger(connection):
    """Send what is asked for: a process of its own."""
    messenger = Messenger(None)
    connection.send_bytes(messenger.address)
    sent = []
    while True:
        address, tag, nbytes = connection.recv()
        sent.append(messenger.send(address, numbers(nbytes), tag))


@contextmanager
def started(function):
    """A process that runs a function of a connection, and the other end of this."""
    context = multiprocessing.get_context("forkserver")
    connection, child_connection = context.Pipe()
    process = context.Process(target=function, args=(child_connection,), daemon=True)
    process.start()
    try:
        yield process, connection
    finally:
        process.kill()  # also where it is stopped, or just gone
        process.join()


@pytest.fixture
def other_process():
    with started(run_messenger) as other_process:
        yield other_process


def take_nothing(connection):
    """Close with a message that nobody took, and end: a process of its own."""
    messenger = Messenger(None)
    messenger.receive(np.zeros(10, "u1"), 1)  # UCX is driven from now on
    connection.send_bytes(messenger.address)
    connection.recv()
    messenger.close()
    del messenger
    gc.collect()
    connection.send("closed")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_closing_does_not_wait_for_a_sender_that_is_stopped(other_process, how):
    sender, sender_connection = other_process
    sender_connection.recv_bytes()
    with started(take_nothing) as (process, connection):
        sender_connection.send((connection.recv_bytes(), 5, 2**25))
        time.sleep(0.2)  # for word of it to get there
        os.kill(sender.pid, how)
        connection.send("close")
        assert connection.poll(BOUND_S), "it hangs"
        process.join(BOUND_S)
        assert process.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
@pytest.mark.parametrize("moment_s", [0, 0.005, pytest.param(0.02, marks=pytest.mark.long)])
def test_a_sender_that_is_stopped_in_the_middle(other_process, how, moment_s):
    """It ends with the whole message or with an error, and the receiver lives on."""
    process, connection = other_process
    connection.recv_bytes()
    local = Messenger(None)
    target = np.zeros(2**26, "u1")
    received = local.receive(target, 5)
    connection.send((local.address, 5, 2**26))
    wait_until(lambda: target[0] or target[1] or received.is_complete or not moment_s)
    time.sleep(moment_s)
    os.kill(process.pid, how)
    with suppress(TransferError):
        received.result(0.3)
        np.testing.assert_array_equal(target, numbers(2**26))
    second_messenger = Messenger(None)
    small = np.zeros(10, "u1")
    received = local.receive(small, 6)
    second_messenger.send(local.address, numbers(10), 6).result(BOUND_S)
    received.result(BOUND_S)
    local.close()
    second_messenger.close()


BLOCK = "block 'x' of there"
GONE = "block 'x' of there is no longer there"
FAILED = "there could not send .*"


@pytest.mark.parametrize(
    ("raised", "error", "words", "details"),
    [
        (KeyError("x"), TransferError, GONE, ("block", False)),
        (MemoryError("1 GiB"), TransferError, FAILED + "out of memory .*1 GiB", ("route", False)),
        (RuntimeError("trouble"), TransferError, FAILED + "RuntimeError: tr", ("route", False)),
        (TransferError("late", is_silence=True), TransferError, FAILED, ("route", True)),
        (TransferError("short", scope="region"), TransferError, "another", ("region", False)),
        (BlockMismatchError("of (2,)"), BlockMismatchError, r"of \(2,\) \(held by there\)", None),
        (UnsupportedArrayError("masked"), BlockMismatchError, "masked .*held by there", None),
    ],
    ids=str,
)
def test_what_a_holder_raises_reaches_the_reader_as_text(raised, error, words, details):
    """With the other reads that fail too."""
    reply = refuse(raised)
    assert all(type(value) is str for value in reply.values())
    with pytest.raises(error, match=words) as caught:
        check_reply(reply, "there", BLOCK)
    assert type(caught.value) is error
    if details is not None:
        assert (caught.value.scope, caught.value.is_silence) == details


def test_an_obstacle_goes_from_holder_to_reader():
    obstacle = Obstacle("not-shareable", "it cannot be shared", "Share it")
    reply = refuse(TransferError(obstacle.full_text, obstacle=obstacle))
    with pytest.raises(TransferError, match=r"it cannot be shared\. Share it") as caught:
        check_reply(reply, "there", BLOCK)
    assert caught.value.obstacle == obstacle


def test_no_more_than_the_limit_is_kept():
    buffers = Buffers("numpy", 2**17)
    arrays = [buffers.take((2**16,), "u1") for _ in range(5)]
    arrays.clear()
    assert buffers.idle_bytes == 2**17
    buffers.clear()
    assert buffers.idle_bytes == 0


@pytest.mark.gpu
def test_device_buffers_come_back():
    import cupy

    buffers = Buffers("cupy", 2**30)
    array = buffers.take((1000, 1000), "c16")
    where = array.data.ptr
    view = array[5:].T
    del array
    gc.collect()
    assert buffers.idle_bytes == 0
    view[...] = 1
    cupy.cuda.runtime.deviceSynchronize()
    del view
    assert buffers.idle_bytes == 16 * 2**20
    assert buffers.take((10, 10), "f4").data.ptr != where
    assert buffers.take((2**24,), "u1").data.ptr == where


@pytest.mark.gpu
def test_what_the_last_owner_queued_is_over():
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    side = 8192
    with private_stream():  # whose memory a pool gives it again
        last = cupy.zeros((side, side), "f8")
        where = last.data.ptr
        for _ in range(20):
            last += 1
        del last
    array = Buffers("cupy", 0).take((side, side), "f8")
    assert array.data.ptr == where
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array[...] = -1
        stream.synchronize()
    cupy.cuda.runtime.deviceSynchronize()
    assert (array == -1).all()


async def test_coroutines_are_kept_until_they_end():
    """Only the coroutine refers to the future that it awaits."""
    background, futures, finished = Background(), [], []

    async def work():
        future = asyncio.get_running_loop().create_future()
        futures.append(weakref.ref(future))
        await future
        finished.append(True)

    background.start(work())
    await asyncio.sleep(0)
    gc.collect()
    futures[0]().set_result(None)
    while background._running:
        await asyncio.sleep(0)
    assert finished == [True]


async def test_cancel():
    background, event = Background(), asyncio.Event()
    background.start(event.wait())
    await asyncio.sleep(0)
    background.cancel()
    while background._running:
        await asyncio.sleep(0)
    assert not event.is_set()
