"""Faulty connections: messages of other workers come late, twice, or not at all.

`install` and the rest are for `client.run`. Answers to RPCs are spoilt where they arrive, messages
of UCX where they are sent.
"""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

from distributed.comm import CommClosedError

from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.transports.ucx_messenger import Message, Messenger

OPS = ("p2p_comm_read", "p2p_ucx_read")

#: Of answers to RPCs.
ANSWERS = ("drop", "lose", "hang", "delay", "duplicate", "reorder")
#: Of messages over UCX.
MESSAGES = ("message-swallow",)

DELAY_S = 0.05  # within every deadline
_PARTNER_S = 0.1  # for which an answer waits for another one to go before it


class Faults:
    """Chooses the next fault, one of these names at random.

    A share of the answers, or messages, with the numbers `at` gets one; of all, if that is None.
    Numbers are counted from 1.
    """

    def __init__(self, seed, faults, at, share):
        self.random = random.Random(seed)
        self.faults, self.at, self.share = faults, at, share
        self.number = Counter()
        self.counts = Counter()  # by name

    def next(self, names):
        """Return the fault for the next answer, or message, or None."""
        self.number[names] += 1
        chosen = self.at is None or self.number[names] in self.at
        possible = [fault for fault in self.faults if fault in names]
        if not chosen or not possible or self.random.random() >= self.share:
            return None
        return self.random.choice(possible)

    def was_none(self, names):
        """Give the fault to the next message: this one has nothing to spoil."""
        self.number[names] -= 1


class FaultyCalls:
    """Stands for `WorkerContext.call`."""

    def __init__(self, call, faults, deadline_s):
        self.call, self.faults, self.deadline_s = call, faults, deadline_s
        self._overtaken = None  # event of the answer that waits for another one to overtake it

    async def __call__(self, address, op, **kwargs):
        fault = self.faults.next(ANSWERS) if op in OPS else None
        if fault == "drop":  # on its way there
            self.faults.counts[fault] += 1
            raise CommClosedError("dropped on purpose")
        try:
            reply = await self.call(address, op, **kwargs)
        except BaseException:  # given up, for one
            self.faults.was_none(ANSWERS)
            raise
        if fault is None:
            return reply
        self.faults.counts[fault] += 1
        if fault == "lose":  # on its way back
            raise CommClosedError("lost on purpose")
        if fault == "hang":
            await asyncio.sleep(2 * self.deadline_s)
        elif fault == "delay":
            await asyncio.sleep(DELAY_S)
        elif fault == "duplicate":
            reply = await self.call(address, op, **kwargs)
        else:
            await self._reorder()
        return reply

    async def _reorder(self):
        """Hold an answer until the next one that gets here has been given out."""
        if self._overtaken is not None:
            waiting_answer, self._overtaken = self._overtaken, None
            asyncio.get_running_loop().call_later(DELAY_S / 10, waiting_answer.set)
            return
        self._overtaken = waiting_answer = asyncio.Event()
        try:
            await asyncio.wait_for(waiting_answer.wait(), _PARTNER_S)
        except TimeoutError:
            if self._overtaken is waiting_answer:
                self._overtaken = None


class FaultySends:
    """Stands for `Messenger.send`."""

    def __init__(self, send, faults):
        self.send, self.faults = send, faults

    def __call__(self, messenger, address, array, tag):
        fault = self.faults.next(MESSAGES)
        if fault is None:
            return self.send(messenger, address, array, tag)
        self.faults.counts[fault] += 1
        sent = SimpleNamespace(completed=True, check_error=lambda: None)
        return Message(sent, array, tag, lambda _: None)


_SEND = Messenger.send


def install(seed, faults, deadline_s, at=None, share=1.0, *, dask_worker):
    """Make this worker's connections faulty; forget its failures of other workers."""
    plugin = dask_worker.plugins[PLUGIN_NAME]
    remove(dask_worker=dask_worker)
    dask_worker.faults = Faults(f"{seed} {dask_worker.name}", faults, at, share)
    host = plugin.context
    host.call = FaultyCalls(type(host).call.__get__(host), dask_worker.faults, deadline_s)
    sends = FaultySends(_SEND, dask_worker.faults)
    Messenger.send = lambda messenger, *message, **_: sends(messenger, *message)


def remove(*, dask_worker):
    """Remove all faults; return the number of times that each happened."""
    plugin = dask_worker.plugins[PLUGIN_NAME]
    plugin.context.__dict__.pop("call", None)
    plugin.context.router.failures.clear()
    Messenger.send = _SEND
    return dict(getattr(dask_worker, "faults", SimpleNamespace(counts={})).counts)
