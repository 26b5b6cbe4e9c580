"""Methods of Dask's scheduler that are replaced for some tasks.

They are private methods of Dask's scheduler. An `Overlay` takes the place of such a method, as an
attribute of the scheduler itself, and passes on everything that it does not decide.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Overlay", "has_method"]


def has_method(scheduler: Any, name: str, parameters: Sequence[str]) -> bool:
    """Return whether a scheduler has a method with these parameters; another Dask may not."""
    method = getattr(type(scheduler), name, None)
    return method is not None and [*inspect.signature(method).parameters] == ["self", *parameters]


class Overlay:
    """Takes the place of one method of a scheduler, until it is no longer wanted.

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
