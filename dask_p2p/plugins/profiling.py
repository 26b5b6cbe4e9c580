"""Sets the interval of Dask's statistical profiler on a worker, which has no public setting."""

from __future__ import annotations

from distributed import Worker

#: Name of the profiler among the worker's periodic callbacks.
PROFILE = "profile"


class SamplingInterval:
    """The interval of a worker's profiler. Without a profiler, changes have no effect."""

    def __init__(self, worker: Worker) -> None:
        self._sampling = worker.periodic_callbacks.get(PROFILE)  # None: the profiler is off
        self._own_ms = 0.0 if self._sampling is None else self._sampling.callback_time

    def set_least(self, least_ms: float) -> None:
        """Set Dask's own interval, or this one if it is longer. On the event loop."""
        if self._sampling is not None:
            self._sampling.callback_time = max(self._own_ms, least_ms)
