"""The name by which the first version of the package pickled its plans.

Without it, what that version sends could not be unpickled, which Dask does not tell a user.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dask_p2p.versioned import versioned

__all__ = ["Plan"]


@versioned()
@dataclass
class Plan:
    """A plan of the first version: it is read, and refused by the task that has it."""

    chunks: Any
