"""What Dask's scheduler decides otherwise for this package's tasks.

Such a decision is a private method of Dask's scheduler. An `Overlay` takes the method's place, as
an attribute of the scheduler itself, and passes everything on that it does not decide.

One decision there is: Dask refuses a task whose whole dependencies are larger than the memory of
its worker. Of this package's tasks only regions move there, and each checks by itself, on its
worker, that they fit (`dask_p2p.memory`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dask_p2p.task import PLUGIN_NAME, AssembleTask

__all__ = ["Overlay", "overlay_memory_check"]

_MEMORY_CHECK = "_add_to_processing"


class Overlay:
    """Takes the place of one method of a scheduler, until it is not wanted any more.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    method : str
        Name of its method.
    decide : callable
        Called with Dask's own method and the arguments.
    is_wanted : callable
        Asked at each call: once it says no, the overlay goes.
    """

    def __init__(
        self,
        scheduler: Any,
        method: str,
        decide: Callable[..., Any],
        is_wanted: Callable[[], bool],
    ) -> None:
        current = getattr(scheduler, method)
        # One that is there is not wanted any more, and has not been called since.
        self.original: Callable[..., Any] = (
            current.original if isinstance(current, Overlay) else current
        )
        self._scheduler, self._method = scheduler, method
        self._decide, self._is_wanted = decide, is_wanted
        setattr(scheduler, method, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_wanted():
            return self._decide(self.original, *args, **kwargs)
        self.remove()
        return self.original(*args, **kwargs)

    def remove(self) -> None:
        """Give the method back, unless somebody else has taken its place since."""
        if vars(self._scheduler).get(self._method) is self:
            delattr(self._scheduler, self._method)
            if getattr(self._scheduler, self._method) != self.original:  # somebody else's
                setattr(self._scheduler, self._method, self.original)


def overlay_memory_check(
    scheduler: Any,
    is_wanted: Callable[[], bool],
    obstacle: Callable[[str], Exception | None],
) -> Overlay | None:
    """Leave Dask's check of whole dependencies out for this package's tasks.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    is_wanted : callable
        See `Overlay`.
    obstacle : callable
        Returns why a worker, by address, cannot be sent such a task; None if it can.

    Returns
    -------
    Overlay or None
        None if this Dask has another check, or none: then it is left alone.
    """
    method = getattr(type(scheduler), _MEMORY_CHECK, None)
    if method is None or [*inspect.signature(method).parameters] != [
        "self", "ts", "ws", "stimulus_id",
    ]:  # fmt: skip
        return None

    def decide(original: Any, ts: Any, ws: Any, stimulus_id: str) -> Any:
        if not isinstance(ts.run_spec, AssembleTask) or PLUGIN_NAME not in scheduler.worker_plugins:
            return original(ts, ws, stimulus_id=stimulus_id)
        limit_bytes, ws.memory_limit = ws.memory_limit, 0  # that is, none
        try:
            processing = original(ts, ws, stimulus_id=stimulus_id)
        finally:
            ws.memory_limit = limit_bytes
        error = obstacle(ws.address)
        return processing if error is None else _fail(scheduler, ts, ws, error, stimulus_id)

    return Overlay(scheduler, _MEMORY_CHECK, decide, is_wanted)


def _fail(scheduler: Any, ts: Any, ws: Any, error: Exception, stimulus_id: str) -> Any:
    """Fail a task that has just been placed, as Dask's own check does."""
    from distributed.protocol.pickle import dumps

    return scheduler._transition(
        ts.key,
        "erred",
        exception=dumps(error),
        cause=ts.key,
        stimulus_id=stimulus_id,
        worker=ws.address,
    )
