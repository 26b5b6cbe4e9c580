"""Messages over UCX between processes that have exchanged their UCX addresses.

A messenger has its own UCX context, separate from Dask's protocol ``ucx``, which Dask's event loop
drives. UCX makes progress only when it is driven: a thread of ucxx, which needs no interpreter
lock, drives it while messages are in transit. A thread that sends or receives polls for completion,
so no message waits for an event loop or another thread.

The first messenger imports ucxx and starts UCX; the import of this module does not.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np

from dask_p2p.backends.device import relax_capture
from dask_p2p.errors import Obstacle, TransferError, install_command
from dask_p2p.types import Array

CLOSE_TIMEOUTS = 10  # of a message, until an endpoint to another host is closed

NAP_S = 20e-6
_EPOLL_MS = 1
_CLOSE_ROUND_NS = 50_000_000
_CLOSE_ROUNDS = 20


@cache  # the search goes through folders, and would delay each source of a block
def ucxx_obstacle() -> Obstacle | None:
    """Return the known reason why this process cannot use ucxx, or None."""
    from importlib.util import find_spec

    if find_spec("ucxx") is None:
        remedy = f"On all workers run: {install_command('ucx')}; [cuda13] includes it"
        return Obstacle("not-installed", "ucxx is not installed", remedy)
    return None


class Message:
    """A message in transit. It keeps its array until UCX no longer uses it."""

    def __init__(
        self, request: Any, array: Array, tag: int, give_up: Callable[[Message, float], None]
    ):
        self._request = request
        self._give_up = give_up
        self.array = array
        self.tag = tag
        self.is_ended = False  # true if it was cancelled: waits for it end

    @property
    def is_complete(self) -> bool:
        return bool(self._request.completed)

    def give_up(self, timeout_s: float) -> None:
        """Stop waiting for the message, after a wait of `timeout_s`."""
        self._give_up(self, timeout_s)

    def result(self, timeout_s: float) -> None:
        """Wait for the message; `TransferError` if it does not arrive completely."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while not self._request.completed:
                if self.is_ended:
                    raise TransferError("the message was given up, or the worker is closing")
                if time.monotonic() > deadline_s:
                    raise TransferError(f"no message within {timeout_s:g} s", is_silence=True)
                time.sleep(NAP_S)
        except BaseException:
            self.give_up(timeout_s)
            raise
        try:
            with _translate_errors():
                self._request.check_error()
        finally:
            self.array = None  # free it now, since the messenger drops messages later


class Messenger:
    """Sends arrays of bytes to the `address` of other processes' messengers, and receives them.

    A message has a tag, which the receiver chooses and uses only once. `device` is the number of
    this process's GPU; None without one. A new messenger raises `TransferError` if UCX does not
    start.
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
            # The default features include one-sided memory, streams and active messages.
            features = (Feature.TAG, Feature.WAKEUP)
            # UCX's own default blocks the thread that drives all messages while TCP connects: for
            # minutes if a host is unreachable.
            options = {} if "UCX_TCP_CONN_NB" in os.environ else {"TCP_CONN_NB": "y"}
            context = self._lib.UCXContext(options, feature_flags=features)
            self._worker = self._lib.UCXWorker(context)
            self.address: bytes = self._worker.address.tobytes()
        except Exception as exc:
            raise TransferError(f"UCX does not start: {type(exc).__name__}: {exc}") from exc
        if device is not None:
            self._worker.set_progress_thread_start_callback(lambda: _use_device(device))
        # Polling detects the end of a copy immediately. On a machine without a GPU the polling core
        # would be missing for the copies of messages.
        self._poll = device is not None
        self._driven = False
        self.endpoints: dict[bytes, Any] = {}
        self._endpoint_counts: Counter[bytes] = (
            Counter()
        )  # number of endpoints made so far, by address
        self._messages: deque[Message] = deque()  # messages that UCX may still use
        self._waiting: set[threading.Timer] = set()
        self._used_s = time.monotonic()
        self._closed = False
        self._lock = threading.RLock()

    def send(self, address: bytes, array: Array, tag: int, *, other_host: bool = False) -> Message:
        """Send a C-ordered array of bytes. Raises `TransferError` if UCX refuses it."""
        give_up = partial(self._forget_unsent, address, other_host)
        with self._lock, _translate_errors():
            self._drive()
            request = self._endpoint(address).tag_send(self._wrap(array), self._lib.UCXXTag(tag))
            return self._remember(Message(request, array, tag, give_up))

    def receive(self, array: Array, tag: int) -> Message:
        """Receive a message into an array of bytes.

        A longer message is an error, a shorter one is not: its length must be sent separately.
        Raises `TransferError` if UCX refuses it.
        """
        with self._lock, _translate_errors():
            self._drive()
            request = self._worker.tag_recv(self._wrap(array), self._lib.UCXXTag(tag))
            return self._remember(
                Message(request, array, tag, lambda given_up, _: self.end(given_up))
            )

    def end(self, message: Message) -> None:
        """Cancel a message that will not arrive.

        UCX cannot cancel a single receive request, so the messenger sends itself an empty message.
        """
        with self._lock:
            if message.is_complete or message.is_ended or self._closed:
                return
            message.is_ended = True
            nothing = np.empty(0, np.uint8)
            with _translate_errors():
                endpoint = self._endpoint(self.address)
                tag = self._lib.UCXXTag(message.tag)
                request = endpoint.tag_send(self._wrap(nothing), tag)
            self._remember(Message(request, nothing, message.tag, lambda *_: None))

    def forget(self, address: bytes) -> None:
        """Close the endpoint to an address, if there is one; its unsent messages fail."""
        with self._lock:
            endpoint = self.endpoints.pop(address, None)
        _close([endpoint])

    def _forget_unsent(
        self, address: bytes, other_host: bool, message: Message, timeout_s: float
    ) -> None:
        """Close an endpoint that does not deliver a message.

        An endpoint to another host is closed later: over TCP, UCX 1.21 sometimes crashes if an
        endpoint is closed during a message, which is likely on a slow link.
        """
        if not other_host:
            self.forget(address)
            return

        def forget_if_unsent() -> None:
            self._waiting.discard(timer)
            if not message.is_complete:
                self.forget(address)

        timer = threading.Timer(CLOSE_TIMEOUTS * timeout_s, forget_if_unsent)
        timer.daemon = True
        with self._lock:
            if not self._closed:
                self._waiting.add(timer)
                timer.start()

    def count_closed(self, address: bytes) -> int:
        with self._lock:  # all endpoints except an open one
            return self._endpoint_counts[address] - (address in self.endpoints)

    def reset_endpoint(self, address: bytes, closed: int) -> None:
        """Abandon endpoints that the other side has closed.

        UCX pairs the n-th endpoint of one process to another with the n-th endpoint of the other
        one to the first. If one side is closed, messages from the other side are lost, and UCX
        detects this late or never. `closed` is the other side's `Messenger.count_closed` for this
        process.
        """
        abandoned = []
        with self._lock, _translate_errors():
            while self._endpoint_counts[address] < closed:
                abandoned.append(self.endpoints.pop(address, None))
                self._make_endpoint(address)
            if self._endpoint_counts[address] == closed:
                abandoned.append(self.endpoints.pop(address, None))
        _close(abandoned)

    @property
    def in_flight(self) -> int:
        with self._lock:
            self._messages = deque(message for message in self._messages if not message.is_complete)
            return len(self._messages)

    def stop_when_idle(self, idle_s: float) -> bool:
        """Stop driving UCX after `idle_s` without messages; return true if it is stopped.

        The next message drives it again.
        """
        with self._lock:
            if self.in_flight:
                self._used_s = time.monotonic()
            elif self._driven and time.monotonic() - self._used_s >= idle_s:
                self._driven = False
                self._worker.stop_progress_thread()
            return not self._driven

    def close(self) -> None:
        """Cancel all messages, and close all endpoints. This blocks until UCX has closed them."""
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
            if self.in_flight or self._worker.tag_probe(self._lib.UCXXTag(0), nothing).matched:
                # ucxx's destructor receives all unreceived messages, and would wait for ever for
                # senders that have left, so it must never run.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._worker))

    def _endpoint(self, address: bytes) -> Any:
        endpoint = self.endpoints.get(address)
        if endpoint is None or not endpoint.alive:
            endpoint = self._make_endpoint(address)
        return endpoint

    def _make_endpoint(self, address: bytes) -> Any:
        for other_address, endpoint in [*self.endpoints.items()]:
            if not endpoint.alive:  # its process may have ended; its address is never reused
                del self.endpoints[other_address]
        remote = self._lib.UCXAddress.create_from_buffer(address)
        endpoint = self._worker.create_endpoint_from_worker_address(remote, True)
        self.endpoints[address] = endpoint
        self._endpoint_counts[address] += 1
        return endpoint

    def _drive(self) -> None:
        if self._closed:
            raise TransferError("the worker is closing")
        self._used_s = time.monotonic()
        if not self._driven:
            self._driven = True
            self._worker.start_progress_thread(polling_mode=self._poll, epoll_timeout=_EPOLL_MS)

    def _remember(self, message: Message) -> Message:
        while self._messages and self._messages[0].is_complete:
            self._messages.popleft()
        self._messages.append(message)
        return message


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise a `TransferError` for the errors of ucxx, which has a class for each UCX status."""
    try:
        yield
    except TransferError:
        raise
    except Exception as exc:
        raise TransferError(f"{type(exc).__name__}: {exc}") from exc


def _close(endpoints: Iterable[Any]) -> None:
    """Close endpoints, which may take a second for each. Call it without a lock."""
    for endpoint in endpoints:
        if endpoint is not None:
            endpoint.close_blocking(_CLOSE_ROUND_NS, _CLOSE_ROUNDS)


def _use_device(device: int) -> None:
    """Set up the thread that drives UCX, without breaking other threads' CUDA graph captures."""
    import cupy

    cupy.cuda.Device(device).use()
    relax_capture()
