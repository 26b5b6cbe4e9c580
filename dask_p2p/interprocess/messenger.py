"""Messages over UCX, between processes that know each other's UCX address.

A messenger has a UCX context of its own, apart from the one of Dask's protocol ``ucx``, which
Dask's event loop looks after. UCX moves nothing by itself: a thread of ucxx, which needs no Python
lock, drives it while messages are under way. A thread that sends or receives looks now and then
whether that is done; so no message waits for a turn of an event loop, or of another thread.

ucxx is imported, and UCX started, with the first messenger; never with this module.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import numpy as np

from dask_p2p.backends.device import relax_capture
from dask_p2p.errors import Obstacle, SilentError, TransferError
from dask_p2p.types import Array

NAP_S = 20e-6
_EPOLL_MS = 1
_CLOSE_ROUND_NS = 50_000_000
_CLOSE_ROUNDS = 20
_PATIENCE = 10  # times as long as a message was waited for
_MOST_BEHIND = 1000  # endpoints that another process had, and this one has not


@cache  # the search goes through folders, and each source of a block would wait for it
def ucxx_obstacle() -> Obstacle | None:
    """Return why ucxx cannot be used in this process; None if nothing is known to prevent it."""
    from importlib.util import find_spec

    if find_spec("ucxx") is None:
        text = "ucxx is not installed (it is part of dask-p2p[cuda13]; pip install ucxx-cu13)"
        return Obstacle("not-installed", text, "Install dask-p2p[cuda13] on all workers")
    return None


class Message:
    """A message on its way. Its array is kept until UCX is done with it."""

    def __init__(
        self, request: Any, array: Array, tag: int, give_up: Callable[[Message, float], None]
    ):
        self._request = request
        self._give_up = give_up
        self.array = array
        self.tag = tag
        self.is_ended = False  # it was given up: nobody should wait for it

    @property
    def done(self) -> bool:
        """Whether UCX is done with the array, well or not."""
        return bool(self._request.completed)

    def give_up(self, timeout_s: float) -> None:
        """Wait no more for a message, after one has waited for so long."""
        self._give_up(self, timeout_s)

    def result(self, timeout_s: float) -> None:
        """Wait until the message has arrived; `TransferError` if it does not, or not whole."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while not self._request.completed:
                if self.is_ended:
                    raise TransferError("the message was given up, or the worker is closing")
                if time.monotonic() > deadline_s:
                    raise SilentError(f"no message within {timeout_s:g} s")
                time.sleep(NAP_S)
        except BaseException:
            self.give_up(timeout_s)
            raise
        try:
            self._request.check_error()
        except Exception as exc:  # ucxx has a class for each status of UCX
            raise TransferError(f"{type(exc).__name__}: {exc}") from exc
        finally:
            self.array = None  # UCX is done with it; the messenger forgets messages only later


class Messenger:
    """Sends arrays of bytes to the `address` of other processes' messengers, and receives them.

    A message is told by its tag, which the receiver chooses, and never uses again. The device is
    the number of the GPU that this process uses; None without one. Making a messenger raises
    `TransferError` if UCX cannot be started.
    """

    def __init__(self, device: int | None) -> None:
        # Otherwise UCX warns in each worker's log about variables that ucxx itself sets.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        try:
            import ucxx
            from ucxx._lib.arr import Array
            from ucxx._lib.libucxx import Feature

            self._lib = ucxx.libucxx
            self._wrap = Array
            # By default also one-sided memory, streams and active messages are made ready.
            features = (Feature.TAG, Feature.WAKEUP)
            self._worker = self._lib.UCXWorker(self._lib.UCXContext({}, feature_flags=features))
            self.address: bytes = self._worker.address.tobytes()
        except Exception as exc:
            raise TransferError(f"UCX does not start: {type(exc).__name__}: {exc}") from exc
        if device is not None:
            self._worker.set_progress_thread_start_callback(lambda: _use_device(device))
        # Polling finds the end of a copy at once. On a machine without a GPU the core that polls
        # would be missing where messages are copied.
        self._poll = device is not None
        self._driven = False
        self.endpoints: dict[bytes, Any] = {}
        self._made: Counter[bytes] = Counter()  # endpoints that there ever were, by address
        self._messages: deque[Message] = deque()  # that UCX may not be done with
        self._waiting: set[threading.Timer] = set()
        self._used_s = time.monotonic()
        self._closed = False
        self._lock = threading.RLock()

    def send(self, address: bytes, array: Array, tag: int, *, other_host: bool = False) -> Message:
        """Send a C-ordered array of bytes."""
        give_up = partial(self._forget_unsent, address, other_host)
        with self._lock:
            self._drive()
            request = self._endpoint(address).tag_send(self._wrap(array), self._lib.UCXXTag(tag))
            return self._noted(Message(request, array, tag, give_up))

    def receive(self, array: Array, tag: int) -> Message:
        """Receive a message into an array of bytes.

        A longer one is an error; a shorter one is not, and has to be told in another way.
        """
        with self._lock:
            self._drive()
            request = self._worker.tag_recv(self._wrap(array), self._lib.UCXXTag(tag))
            return self._noted(Message(request, array, tag, lambda given_up, _: self.end(given_up)))

    def end(self, message: Message) -> None:
        """Cancel a message that will not arrive.

        UCX cannot take back a single request for one. It gets an empty message, from ourselves.
        """
        with self._lock:
            if message.done or message.is_ended or self._closed:
                return
            message.is_ended = True
            nothing = np.empty(0, np.uint8)
            endpoint = self._endpoint(self.address)
            tag = self._lib.UCXXTag(message.tag)
            request = endpoint.tag_send(self._wrap(nothing), tag)
            self._noted(Message(request, nothing, message.tag, lambda *_: None))

    def forget(self, address: bytes) -> None:
        """Close the endpoint to an address, if there is one; what is sent there fails."""
        with self._lock:
            endpoint = self.endpoints.pop(address, None)
        _close([endpoint])

    def _forget_unsent(
        self, address: bytes, other_host: bool, message: Message, timeout_s: float
    ) -> None:
        """Close an endpoint through which a message does not get.

        Not at once to another host: over TCP, UCX 1.21 crashes at times if an endpoint is closed
        while a message goes through it, as it does on a slow link.
        """
        if not other_host:
            self.forget(address)
            return

        def look() -> None:
            self._waiting.discard(timer)
            if not message.done:
                self.forget(address)

        timer = threading.Timer(_PATIENCE * timeout_s, look)
        timer.daemon = True
        with self._lock:
            if not self._closed:
                self._waiting.add(timer)
                timer.start()

    def closed(self, address: bytes) -> int:
        """Return the number of the endpoint to an address that was closed last; the first is 1."""
        with self._lock:  # all but the one that there is, if there is one
            return self._made[address] - (address in self.endpoints)

    def renew(self, address: bytes, closed: int) -> None:
        """Leave endpoints behind whose other side is closed.

        UCX makes a pair of the n-th endpoint of one process to another and the n-th of the other
        one to the first. If one side is closed, what is sent from the other one gets lost, and
        UCX notices that only after a while, if at all. `closed` is what `Messenger.closed` says
        there of the endpoints to here; `TransferError` if that is more than can be.
        """
        left = []
        with self._lock:
            if closed - self._made[address] > _MOST_BEHIND:
                raise TransferError(f"the reader has closed endpoint {closed}, unheard of here")
            while self._made[address] < closed:
                left.append(self.endpoints.pop(address, None))
                self._make_endpoint(address)
            if self._made[address] == closed:
                left.append(self.endpoints.pop(address, None))
        _close(left)

    @property
    def under_way(self) -> int:
        """Count the messages that UCX is not done with."""
        with self._lock:
            self._messages = deque(message for message in self._messages if not message.done)
            return len(self._messages)

    def rest(self, idle_s: float) -> bool:
        """Stop driving UCX if there was nothing to do for so long; return whether it is stopped.

        It goes on with the next message.
        """
        with self._lock:
            if self.under_way:
                self._used_s = time.monotonic()
            elif self._driven and time.monotonic() - self._used_s >= idle_s:
                self._driven = False
                self._worker.stop_progress_thread()
            return not self._driven

    def close(self) -> None:
        """End all messages, and close all endpoints. This blocks until UCX has closed them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for message in self._messages:
                message.is_ended = True
            while self._waiting:
                self._waiting.pop().cancel()
            for address in list(self.endpoints):
                self.forget(address)
            if self._driven:
                self._driven = False
                self._worker.stop_progress_thread()
            nothing = self._lib.UCXXTagMask(0)
            if self.under_way or self._worker.tag_probe(self._lib.UCXXTag(0), nothing).matched:
                # ucxx's destructor receives messages that nobody received. It would wait forever
                # for senders that have left, so it must never run.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._worker))

    def _endpoint(self, address: bytes) -> Any:
        endpoint = self.endpoints.get(address)
        if endpoint is None or not endpoint.alive:
            endpoint = self._make_endpoint(address)
        return endpoint

    def _make_endpoint(self, address: bytes) -> Any:
        for known, endpoint in [*self.endpoints.items()]:
            if not endpoint.alive:  # perhaps its process has ended, whose address nobody has again
                del self.endpoints[known]
        remote = self._lib.UCXAddress.create_from_buffer(address)
        endpoint = self._worker.create_endpoint_from_worker_address(remote, True)
        self.endpoints[address] = endpoint
        self._made[address] += 1
        return endpoint

    def _drive(self) -> None:
        if self._closed:
            raise TransferError("the worker is closing")
        self._used_s = time.monotonic()
        if not self._driven:
            self._driven = True
            self._worker.start_progress_thread(polling_mode=self._poll, epoll_timeout=_EPOLL_MS)

    def _noted(self, message: Message) -> Message:
        while self._messages and self._messages[0].done:
            self._messages.popleft()
        self._messages.append(message)
        return message


def _close(endpoints: Iterable[Any]) -> None:
    """Close endpoints, each of which may take a second. Call it without holding a lock."""
    for endpoint in endpoints:
        if endpoint is not None:
            endpoint.close_blocking(_CLOSE_ROUND_NS, _CLOSE_ROUNDS)


def _use_device(device: int) -> None:
    """Set up the thread that drives UCX. It must not break captures of CUDA graphs by others."""
    import cupy

    cupy.cuda.Device(device).use()
    relax_capture()
