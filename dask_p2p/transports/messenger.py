"""Messages over UCX: endpoints to other processes, and one thread that looks after them.

UCX moves nothing by itself: somebody has to call its progress function, and whoever calls it from
several threads has to lock. Here one thread owns everything of UCX and of ucxx; others put orders
into its queue, and get futures. It has a context of its own, apart from the one of Dask's protocol
``ucx``, which Dask's event loop looks after.

ucxx is imported, and UCX started, with the first messenger; never with this module.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from dask_p2p.errors import TransferError

__all__ = ["Messenger", "ucxx_obstacle"]

_IDLE_S = 0.05  # between looks at UCX when nothing is on its way
_SPINS = 100  # looks without a pause after something has happened
_SHORTEST_NAP_S = 10e-6
_LONGEST_NAP_S = 200e-6
_START_S = 30.0
_CLOSE_ROUNDS = 2000


def ucxx_obstacle() -> str | None:
    """Say why ucxx cannot be used in this process; None if it can, as far as is known."""
    from importlib.util import find_spec

    if find_spec("ucxx") is None:
        return "ucxx is not installed (it is part of dask-p2p[cuda13]; pip install ucxx-cu13)"
    return None


class _Order:
    """One message on its way. Everything but its future belongs to the messenger's thread."""

    def __init__(self, array: Any, tag: int, timeout_s: float) -> None:
        self.future: Future[None] = Future()
        self.array = array
        self.tag = tag
        self.timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.late = False  # nobody waits any more, but UCX may still use the array
        self._request: Any = None  # of ucxx

    def start(self, ucx: _Ucx) -> Any:
        """Hand the message to UCX and return the request; None if it cannot be done yet."""
        raise NotImplementedError

    def give_up(self, ucx: _Ucx) -> None:
        """Have UCX end a request that takes too long, if it can."""

    def step(self, ucx: _Ucx) -> bool:
        """Look how far it is; return whether UCX is done with it, and with the array."""
        try:
            if self._request is None:
                if self.future.cancelled():
                    return True
                self._request = self.start(ucx)
            if self._request is not None and self._request.completed:
                request, self._request = self._request, None  # it keeps all of UCX alive
                request.check_error()
                self._end(self.future.set_result, None)
                return True
        except Exception as exc:
            self.fail(exc)
            return True
        if not self.late and time.monotonic() > self.deadline_s:
            self.late = True
            self.fail(TransferError(f"no message within {self.timeout_s:g} s"))
            if self._request is not None:
                self.give_up(ucx)
        return self.late and self._request is None

    def fail(self, error: Exception) -> None:
        if not isinstance(error, TransferError):
            error = TransferError(f"{type(error).__name__}: {error}")
        self._end(self.future.set_exception, error)

    def _end(self, say: Callable[[Any], None], what: Any) -> None:
        with suppress(InvalidStateError):  # cancelled, or failed before
            say(what)


class _Send(_Order):
    def __init__(self, address: bytes, array: Any, tag: int, timeout_s: float) -> None:
        super().__init__(array, tag, timeout_s)
        self.address = address

    def start(self, ucx: _Ucx) -> Any:
        return ucx.send(self.address, self.array, self.tag)

    def give_up(self, ucx: _Ucx) -> None:
        ucx.forget(self.address)


class _Receive(_Order):
    def start(self, ucx: _Ucx) -> Any:
        length_bytes = ucx.arrived(self.tag)
        if length_bytes is None:
            return None
        # UCX takes a message that is too short for a good one.
        if length_bytes != self.array.nbytes:
            raise TransferError(
                f"a message of {length_bytes} bytes came instead of {self.array.nbytes}"
            )
        return ucx.receive(self.array, self.tag)


class _Ucx:
    """Everything of ucxx; used by one thread only."""

    def __init__(self, device: int | None) -> None:
        # UCX would complain in each worker's log about variables that ucxx itself sets.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        if device is not None:
            import cupy

            cupy.cuda.Device(device).use()
        import ucxx
        from ucxx._lib.arr import Array

        self._lib = ucxx.libucxx
        self._wrap = Array
        self._context = self._lib.UCXContext({})
        self._worker = self._lib.UCXWorker(self._context)
        self._endpoints: dict[bytes, Any] = {}
        self.address: bytes = self._worker.address.tobytes()

    def progress(self) -> bool:
        return bool(self._worker.progress_once())

    def send(self, address: bytes, array: Any, tag: int) -> Any:
        endpoint = self._endpoints.get(address)
        if endpoint is None or not endpoint.alive:
            there = self._lib.UCXAddress.create_from_buffer(address)
            endpoint = self._worker.create_endpoint_from_worker_address(there, True)
            self._endpoints[address] = endpoint
        return endpoint.tag_send(self._wrap(array), self._lib.UCXXTag(tag))

    def arrived(self, tag: int) -> int | None:
        """Return the length in bytes of the message with this tag; None if there is none."""
        found = self._worker.tag_probe(self._lib.UCXXTag(tag))
        return int(found.length) if found.matched else None

    def receive(self, array: Any, tag: int) -> Any:
        return self._worker.tag_recv(self._wrap(array), self._lib.UCXXTag(tag))

    def forget(self, address: bytes) -> None:
        endpoint = self._endpoints.pop(address, None)
        if endpoint is not None:
            endpoint.close_blocking(0, _CLOSE_ROUNDS)

    def close(self) -> None:
        for address in list(self._endpoints):
            self.forget(address)
        self._worker.cancel_inflight_requests(0, _CLOSE_ROUNDS)
        nothing = self._lib.UCXXTagMask(0)
        if self._worker.tag_probe(self._lib.UCXXTag(0), nothing).matched:
            # ucxx's destructor receives what nobody took; it would wait for senders that are gone,
            # for ever. Let it never run.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._worker))


class Messenger:
    """Sends arrays of bytes to other processes' messengers, and receives them.

    A message is told by its tag, which the receiver chooses, and never uses again.

    Parameters
    ----------
    device
        Number of the GPU that this process uses; None without one.

    Raises
    ------
    TransferError
        If UCX cannot be started.
    """

    def __init__(self, device: int | None) -> None:
        self._device = device
        self._orders: deque[_Order | bytes] = deque()  # new ones, and addresses to forget
        self._under_way: list[_Order] = []
        self._news = threading.Event()
        self._closed = False
        self._ready: Future[bytes] = Future()
        self._thread = threading.Thread(target=self._run, name="p2p-ucx", daemon=True)
        self._thread.start()
        try:
            #: Where other messengers send to.
            self.address: bytes = self._ready.result(_START_S)
        except Exception as exc:
            raise TransferError(f"UCX does not start: {type(exc).__name__}: {exc}") from exc

    @property
    def under_way(self) -> int:
        """Count the messages that UCX is not done with."""
        return len(self._under_way) + len(self._orders)

    def send(self, address: bytes, array: Any, tag: int, timeout_s: float) -> Future[None]:
        """Send a C-ordered array of bytes; it may be used again when the future is done."""
        return self._add(_Send(address, array, tag, timeout_s))

    def receive(self, array: Any, tag: int, timeout_s: float) -> Future[None]:
        """Receive a message of just the array's size into it.

        Cancelling the future is no use once the message has begun to arrive; the array is kept
        until then.
        """
        return self._add(_Receive(array, tag, timeout_s))

    def forget(self, address: bytes) -> None:
        """Close the endpoint to an address, if there is one; what is on its way there fails."""
        self._orders.append(address)
        self._news.set()

    def close(self) -> None:
        """Give up everything. Blocks for the time that it takes UCX to say goodbye."""
        self._closed = True
        self._news.set()
        self._thread.join(_START_S)

    def _add(self, order: _Order) -> Future[None]:
        self._orders.append(order)
        self._news.set()
        if self._closed:
            order.fail(TransferError("the worker is closing"))
        return order.future

    def _run(self) -> None:
        try:
            ucx = _Ucx(self._device)
        except BaseException as exc:
            self._ready.set_exception(exc)
            return
        self._ready.set_result(ucx.address)
        quiet = 0  # looks in a row at which nothing happened
        while not self._closed:
            while self._orders:
                order = self._orders.popleft()
                if isinstance(order, bytes):
                    ucx.forget(order)
                else:
                    self._under_way.append(order)
            moved = ucx.progress()
            left = [order for order in self._under_way if not order.step(ucx)]
            moved = moved or len(left) < len(self._under_way)
            self._under_way = left
            quiet = 0 if moved else quiet + 1
            self._pause(quiet, any(not order.late for order in left))
        for order in [*self._under_way, *(o for o in self._orders if isinstance(o, _Order))]:
            order.fail(TransferError("the worker is closing"))
        ucx.close()

    def _pause(self, quiet: int, busy: bool) -> None:
        if not busy:
            self._news.wait(_IDLE_S)
            self._news.clear()
        elif quiet > _SPINS:
            # A core that only looks is one that cannot copy, and it holds Python's lock.
            time.sleep(min(_LONGEST_NAP_S, _SHORTEST_NAP_S * (quiet - _SPINS)))
