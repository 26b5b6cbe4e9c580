"""A timer that calls a function repeatedly, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from dask_p2p.backends.device import device_work
from dask_p2p.errors import DeviceLostError

#: Makes a timer as `threading.Timer` does, of an interval in seconds and a function.
MakeTimer = Callable[[float, Callable[[], None]], threading.Timer]


class RepeatingTimer:
    """Calls a function, which may use the device, at intervals until it returns False."""

    def __init__(
        self,
        interval_s: float,
        function: Callable[[], bool],
        timer: MakeTimer = threading.Timer,
    ) -> None:
        self.interval_s = interval_s
        self._function, self._make_timer = function, timer
        self._timer: threading.Timer | None = None
        self._cancels = 0  # calls of `cancel` so far
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the timer, unless it is running. Any thread may call this."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._timer is None:
            self._timer = self._make_timer(self.interval_s, self._call)
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        """Stop the timer until the next `start`."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            self._cancels += 1

    def _call(self) -> None:
        # Reset first: a `start` from here on may come too late for this call.
        with self._lock:
            self._timer, cancels = None, self._cancels
        with suppress(DeviceLostError), device_work():  # a lost device has lost its memory too
            if self._function():
                with self._lock:
                    if cancels == self._cancels:
                        self._start()
