"""The option `p2p.fuse`: graphs of Dask arrays that one gang runs, without a change of code.

Dask gets the function that optimises the graphs of arrays as the attribute `__dask_optimize__` of
their class. `Optimization` takes the place of this attribute.
"""

from __future__ import annotations

from typing import Any

from dask.array.core import Array
from dask.array.optimization import optimize

from dask_p2p.config import fuse_mode


class Optimization:
    """The attribute `__dask_optimize__` of Dask arrays."""

    def __init__(self, of_dask: Any) -> None:
        self._of_dask = of_dask

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the function that optimises graphs; Dask's own unless the option is set.

        Raises `UnsupportedArrayError` if the option is "on", and no gang can run
        the arrays.
        """
        of_dask = self._of_dask.__get__(instance, owner)
        mode = fuse_mode()
        # Another function is that of the user's option `array_optimize`.
        if mode == "off" or of_dask is not optimize:
            return of_dask
        # Only here: it imports distributed.
        from dask_p2p.fusing.optimizer import optimizer_unless_dask

        return optimizer_unless_dask(mode, [instance]) or of_dask


def put_in_place() -> None:
    """Let the option count for all arrays of this process. Idempotent."""
    of_dask = vars(Array)["__dask_optimize__"]
    if not isinstance(of_dask, Optimization):
        Array.__dask_optimize__ = Optimization(of_dask)
