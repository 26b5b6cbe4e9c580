"""Workers without a cluster: hosts of transports that call each other through Dask's protocol."""

import asyncio
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from distributed.protocol import dumps, loads

from dask_p2p.transports.base import Probes, is_probe
from tests.support import BOUND_S


class EventLoop:
    """An event loop in a thread, as a worker has one."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine, timeout_s=60):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def call(self, function, *args):
        """Call a function on the loop, and return its result."""

        async def coroutine():
            return function(*args)

        return self.run(coroutine())

    def close(self):
        async def cancel_all():
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class LoopbackHost:
    """What a transport needs of its worker; calls go to the other hosts of a dict.

    Messages are serialised and deserialised on the way, as between processes.
    """

    def __init__(self, address, loop, network, folder):
        self.address = address
        self.loop = loop
        self.folder = str(folder)
        self.encrypted_only = False
        self.probes = Probes()
        self.blocks = {}
        self.on_disk = set()  # keys of blocks that would have to be read
        self.handlers = {}
        self.calls = []  # operations that were called here
        self.delay_s = 0.0  # before each answer
        self._network = network
        self._threads = ThreadPoolExecutor(2)
        network[address] = self

    def is_on_disk(self, key):
        return key in self.on_disk

    def block(self, key):
        return self.probes.block(key) if is_probe(key) else self.blocks[key]

    async def call(self, address, op, **kwargs):
        if address not in self._network:
            raise ConnectionRefusedError(f"nobody at {address}")
        host = self._network[address]
        host.calls.append(op)
        if host.delay_s:
            await asyncio.sleep(host.delay_s)
        return _sent(await host.handlers[op](**_sent(kwargs)))

    async def offload(self, function, *args, threads=None):
        return await self.loop.run_in_executor(self._threads, function, *args)

    def close(self):
        self._threads.shutdown()


@contextmanager
def linked(make, loop, folder, options):
    """A reader and a holder, as `Conformance` wants them: each with a transport and a folder."""
    network, hosts, transports = {}, [], []
    for name in ("reader", "holder"):
        (folder / name).mkdir()
        hosts.append(LoopbackHost(name, loop.loop, network, folder / name))
        transports.append(make(hosts[-1], options))
        hosts[-1].handlers.update(transports[-1].handlers())
    (_, holder_host), (reader, serving) = hosts, transports

    def drop(key):
        del holder_host.blocks[key]
        serving.on_released(key)

    yield SimpleNamespace(
        reader=reader,
        holder="holder",
        kind="numpy",
        put=holder_host.blocks.__setitem__,
        drop=drop,
        close_holder=lambda: loop.run(serving.close()),
        to_numpy=np.asarray,
        host=holder_host,
        serving=serving,
        network=network,
    )
    for transport in transports:
        loop.run(transport.close())
    for host in hosts:
        host.close()


def _sent(message):
    """Return a message as it arrives: in other memory."""
    return loads([bytearray(frame) for frame in dumps(message)])


def wait_until(condition, timeout_s=BOUND_S, state=lambda: ""):
    """Wait until a condition holds, and return its value; fail with a state after some time."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not true after {timeout_s:g} s: {state()}"
        time.sleep(0.005)
    return value


async def true_later(condition, timeout_s=BOUND_S):
    """Wait on an event loop until a function, or a coroutine function, returns a true value."""
    deadline_s = time.monotonic() + timeout_s
    while not (await value if inspect.isawaitable(value := condition()) else value):
        assert time.monotonic() < deadline_s, f"not true after {timeout_s:g} s"
        await asyncio.sleep(0.005)
