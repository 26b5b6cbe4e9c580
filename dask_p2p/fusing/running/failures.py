"""Values of tasks that have failed, in a gang that goes on.

A task that reads such a value fails as well, on any rank and in later calls. So the messages of all
ranks stay the same.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from distributed.protocol.pickle import loads

from dask_p2p.sections.gang.rank import pickled_error


@dataclass(frozen=True)
class FailedValue:
    """Takes the place of a value whose task has failed."""

    error: bytes  # pickled exception

    @classmethod
    def of(cls, exc: Exception, rank: int) -> FailedValue:
        """Return the value for an exception on a rank."""
        if exc.__cause__ is None:  # else its notes name the rank
            exc.add_note(f"Raised on rank {rank}.")
        error, _ = pickled_error(exc, rank)
        traceback.clear_frames(exc.__traceback__)  # their arrays are not used any more
        return cls(error)

    def exception(self) -> Exception:
        """Return the exception."""
        found: Exception = loads(self.error)
        return found
