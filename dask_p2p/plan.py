"""The name by which the first version of the package pickled its plans.

Without it, what that version sends could not be unpickled, and its user would not be told why.
"""

from __future__ import annotations

from typing import Any

from dask_p2p.versioned import Unreadable, of_first_version

__all__ = ["Plan"]


def Plan(*_: Any) -> Unreadable:  # noqa: N802  # the name of a class
    """Stand for a plan of the first version: the task that has it raises the error."""
    return of_first_version("dask_p2p.plan.Plan")
