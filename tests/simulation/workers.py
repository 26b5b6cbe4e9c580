"""Workers without processes: the real plugin and transports, on made-up GPUs and a made-up network.

Everything happens in one process, one thing at a time, and in the order that a test says. What runs
in threads (tasks, and what answers requests) is an `Actor`: it halts wherever real threads can be
overtaken, and goes on when it is told to. Messages between workers lie about until they are
delivered. Time passes when somebody waits for it.

A worker is killed by doing what the kernel does: its files are closed, and so its locks end; the
files stay. Its memory is filled with something else.
"""

import fcntl
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from distributed.protocol import dumps, loads

import dask_p2p.engine.task
import dask_p2p.plugins.worker
from dask_p2p.backends.cupy import CUPY
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.transports import cuda_ipc, leases, packed, packed_reading, same_host
from dask_p2p.transports import in_place as ipc
from dask_p2p.transports import packed as comm
from dask_p2p.transports import same_host as reading
from dask_p2p.transports.buffers import Footprint
from dask_p2p.transports.process_memory import Peer
from tests.simulation.actors import Actor, KilledError, Loop, current, halt
from tests.simulation.gpu import Driver, Memory, Queue


class _Halting:
    def probe(self, holder, kind):
        """Proving ways is tested with `Router`."""

    def footprint(self, options, kind):
        return Footprint(16, 1)  # a region is two parts

    def read(self, requests, options):
        halt("open", trouble=True)
        read = super().read(requests, options)
        halting = type(
            "Halting", (read.__class__,), {"__iter__": _halting(read.__class__.__iter__)}
        )
        read.__class__ = halting
        return read


def _halting(regions):
    """Have whoever waits for a region halt."""

    def __iter__(self):  # noqa: N807
        for region in regions(self):
            bring, event, error = region.bring, region.has_arrived, region.error
            region.error = None  # which is raised by whoever waits
            yield region.mark_requested(partial(_bring, bring, event, error), event)

    return __iter__


def _bring(bring, event, error, timeout_s, into):
    actor = current()
    actor.awaited = event
    try:
        halt("wait", trouble=True)
    finally:
        actor.awaited = None
    if error is not None:
        raise error
    return bring(10, into)


class HaltingIpc(_Halting, ipc.IpcTransport):
    def __init__(self, worker, options):
        super().__init__(worker, options)
        self.mappings = cuda_ipc.Mappings()  # each worker stands for a process

    def memory_obstacle(self, local, peer):
        return None

    def describe(self):
        # Numbers of processes that differ, and that the kernel knows none of.
        pid, folder = -ord(self.worker.address), self.directory.folder
        return Peer("boot", "namespace", 0, pid, folder, folder, "gpu")


class HaltingComm(_Halting, comm.CommTransport):
    pass


class HaltingLeases(leases.Leases):
    """Readers may be overtaken just before they lock, and when they have a lease."""

    def __init__(self, world, folder):
        super().__init__(folder)
        self.world, self.folder = world, folder

    def lock(self, byte, kind=fcntl.F_RDLCK):
        if kind == fcntl.F_RDLCK:
            halt("lock")
        super().lock(byte, kind)

    def take(self, key):
        """Take a lease, and note whether that was right."""
        (holder,) = (w for w in self.world.workers if w.directory.folder == self.folder)
        dead = holder.dead
        lease = super().take(key)
        if lease is None:
            return None
        if dead:
            self.world.note_violation("took an entry that a killed worker left behind")
        published = None
        if not holder.dead:
            published = holder.directory.published.get(key)
            if published is None or published.entry != lease[0]:
                self.world.note_violation("took an entry that was taken down")
            elif published.block is not holder.data.get(key):
                self.world.note_violation("took the descriptor of a block that was released")
        current().leases.append(Lease(self, lease[0], holder, published))
        halt("leased")
        return lease


class Lease:
    """What the test knows of a lease: of which published block it is."""

    def __init__(self, leases, entry, holder, published):
        self.leases, self.entry, self.holder, self.published = leases, entry, holder, published
        self.place = None if published is None else published.block.place

    @property
    def is_open(self):
        return self.leases.fd != leases.CLOSED and self.leases.counts[self.entry] > 0


# --- workers, and what is between them ---


class Context(dask_p2p.plugins.worker.DaskWorkerContext):
    def block(self, key):
        block = super().block(key)
        halt("found")
        return block

    async def offload(self, function, *args, threads=None):
        actor = Actor(self._worker, function, *args)
        actor.ended = self.loop.create_future()
        return await actor.ended


class SimulatedWorker:
    """What the plugin sees of a Dask worker."""

    def __init__(self, world, address):
        self.world, self.address = world, address
        self.dead = False
        self.memory = Memory()
        world.driver.memories[b"%d" % len(world.driver.memories)] = self.memory
        self.data, self.handlers, self.metrics = {}, {}, {}
        self.loop = SimpleNamespace(asyncio_loop=world.loop)
        self.local_directory = world.folder  # that of all there were at this address
        self.security = SimpleNamespace(require_encryption=False)
        self.memory_manager = SimpleNamespace(memory_limit=None)
        self.state = SimpleNamespace(tasks={})
        self.rpc = partial(_Rpc, world, self)
        self.stream_handlers = {"compute-task": self._compute, "remove-worker": lambda **_: None}
        self.news = []  # that the scheduler has sent, and that have not arrived
        self.plugin = dask_p2p.plugins.worker.P2PPlugin(world.options)
        world.on_loop(self.plugin.setup, self)
        self.directory = self.plugin.context.router.transports["ipc"].directory

    def log_event(self, topic, event):
        pass

    def _compute(self, key, run_spec, **_):
        values = {name: self.data.get(name) for name in run_spec.dependencies}
        lacks = any(value is None for value in values.values())  # Dask would fetch it first
        self.started = None if lacks else Actor(self, run_spec, values)

    def compute(self, spec, who_has):
        """Let the scheduler send a task."""
        compute = self.stream_handlers["compute-task"]
        nbytes = dict.fromkeys(who_has, 64)
        self.world.on_loop(
            partial(compute, key=spec.key, run_spec=spec, who_has=who_has, nbytes=nbytes)
        )

    def hear(self):
        """Let the scheduler's oldest news arrive."""
        forget = self.stream_handlers["remove-worker"]
        self.world.on_loop(partial(forget, worker=self.news.pop(0)))

    def put(self, key, values):
        self.data[key] = self.memory.put(values)

    def release(self, key):
        if self.data.pop(key, None) is not None:
            self.world.on_loop(self.plugin.transition, key, "memory", "released")

    def kill(self):
        """End as a killed process does: locks end, files stay, memory is somebody else's."""
        self.dead = True
        self.memory.die()
        self.data.clear()
        self.directory.close_file()
        self.directory.published.clear()
        self.directory.withdrawn.clear()
        self.directory.refusal = "killed"
        transport = self.plugin.context.router.transports["ipc"]
        transport.is_closed = True
        if transport.expiring is not None:
            transport.expiring.cancel()
        self.world.buried(self)


class _Rpc:
    def __init__(self, world, sender, address):
        self._call = partial(world.call, sender, address)

    def __getattr__(self, op):
        return partial(self._call, op)


class Message:
    """A request that lies about until it is delivered; then its answer does."""

    place = None

    def __init__(self, world, sender, address, op, kwargs):
        self.world, self.sender, self.address = world, sender, address
        self.op, self.kwargs = op, kwargs
        self.target = self.reply = None
        self.response = world.loop.create_future()

    @property
    def ready(self):
        return not self.response.done() and (self.reply is None or self.reply.done())

    def serve(self):
        """Have it answered: once more, if it was before."""
        target = self.world.alive.get(self.address)
        if target is None:
            self.fail(ConnectionRefusedError("nobody is there"))
            return None
        return self.world.start(target.handlers[self.op], **loads(dumps(self.kwargs)))

    def go_on(self):
        if self.reply is None:
            self.target = self.world.alive.get(self.address)
            self.reply = self.serve()
        elif not self.response.done():
            self.response.set_result(loads(dumps(self.reply.result())))
        self.world.settle()

    def fail(self, error):
        if not self.response.done():
            self.response.set_exception(error)


class World:
    """All of it. Whatever `wrong` is told is a violation of the protocol."""

    def __init__(self, folder, options):
        self.folder, self.options = folder, options
        self.loop = Loop()
        self.driver = Driver(self)
        self.alive = {}  # workers by address
        self.workers = []  # all there ever were
        self.messages, self.actors, self.violations = [], [], []
        self._serving = set()
        self._patch = pytest.MonkeyPatch()
        self._make_up()

    def _make_up(self):
        """Put what is made up in the place of what is real."""
        patch = self._patch.setattr
        patch(CUPY, "check", lambda block: None)
        patch(CUPY, "queue", partial(Queue, self.driver))
        patch(CUPY, "memory_below", lambda wanted_bytes, worker_limit_bytes: None)
        self._patch.setitem(
            sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=self.driver))
        )
        patch(cuda_ipc, "export", self.driver.export)
        patch(cuda_ipc, "array_at", self.driver.array_at)
        patch(ipc, "wait_until_written", lambda blocks, any_stream: halt("export"))
        patch(dask_p2p.plugins.worker, "worker_backend", lambda: NUMPY)
        patch(dask_p2p.plugins.worker, "DaskWorkerContext", Context)
        patch(dask_p2p.plugins.worker, "make_transports", self._make_transports)
        patch(dask_p2p.engine.task, "current_worker", self._current_worker)
        patch(reading, "Leases", partial(HaltingLeases, self))
        now = self.loop.time
        clock = SimpleNamespace(monotonic=now, perf_counter=now, time=now, sleep=self._sleep)
        for module in (same_host, reading, leases, packed, packed_reading, dask_p2p.engine.task):
            patch(module, "time", clock)
        no_timer = SimpleNamespace(start=lambda: None, cancel=lambda: None)  # it runs in real time
        patch(cuda_ipc, "RepeatingTimer", lambda interval_s, function: no_timer)
        reading_class = reading.SameHostReading
        patch(reading_class, "confirm", _halting_confirm(reading_class.confirm))

    def _make_transports(self, host, options):
        return {"ipc": HaltingIpc(host, options), "comm": HaltingComm(host, options)}

    def _current_worker(self):
        worker = current().worker
        return worker, worker.plugin.context

    def _sleep(self, pause_s):
        self.loop.now_s += 0.002
        halt("look again")

    def note_violation(self, check):
        self.violations.append(check)

    # --- what a test does ---

    def join(self, address):
        self.alive[address] = SimulatedWorker(self, address)
        self.workers.append(self.alive[address])

    def buried(self, worker):
        """Take note that a worker was killed: its threads and connections are gone."""
        del self.alive[worker.address]
        for actor in self.actors:
            if actor.worker is worker:
                for lease in actor.leases:
                    lease.leases.close()
        for message in self.messages:
            gone = message.sender is worker or (
                message.target is worker and not message.reply.done()  # else it is on its way
            )
            if gone:
                message.fail(ConnectionAbortedError("it was killed"))
        self.settle()
        for actor in self.actors:
            if actor.worker is worker and not actor.done:
                actor.go_on()
                assert actor.done
        for survivor in self.alive.values():
            survivor.news.append(worker.address)

    async def call(self, sender, address, op, **kwargs):
        """Send a message, and wait for its answer."""
        if sender.dead:
            raise ConnectionAbortedError("the sender was killed")
        actor = current()
        # Others send several, and wait for them elsewhere.
        asking = actor is not None and op.startswith("p2p_ipc")
        message = Message(self, sender, address, op, kwargs)
        self.messages.append(message)
        try:
            if asking:
                actor.asking, actor.running = True, False
                self.loop.stop()
            return await message.response
        finally:
            message.response.cancel()
            self.messages.remove(message)
            if asking:
                actor.asking, actor.running = False, True

    def start(self, function, **kwargs):
        task = self.loop.create_task(function(**kwargs))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return task

    def on_loop(self, function, *args):
        """Call what Dask calls on the event loop."""

        async def call():
            function(*args)

        self.loop.run_until_complete(call())
        self.settle()

    def settle(self):
        """Wait until nobody runs any more."""
        while True:
            while any(actor.running for actor in self.actors):
                self.loop.run_forever()
            for actor in self.actors:
                if actor.done and actor.ended is not None and not actor.ended.done():
                    _hand_over(actor)
            if not self.loop._ready:
                break
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def pass_time(self, seconds):
        self.loop.now_s += seconds
        for _ in range(2):  # timers that are due first become ready
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
            self.settle()

    def ready(self):
        """Return all that can go on."""
        return [one for one in (*self.actors, *self.messages) if one.ready]

    def close(self):
        for worker in list(self.alive.values()):
            worker.kill()
        for task in self._serving:
            task.cancel()
        self.settle()
        for actor in self.actors:
            actor.join()
        self.loop.close()
        self._patch.undo()


def _hand_over(actor):
    if isinstance(actor.error, KilledError):
        actor.ended.cancel()
    elif actor.error is not None:
        actor.ended.set_exception(actor.error)
    else:
        actor.ended.set_result(actor.result)


def _halting_confirm(confirm):
    def halting(same_host_reading):
        halt("is tended")
        confirm(same_host_reading)

    return halting
