"""The members of one attempt, as they know each other."""

from __future__ import annotations

from dataclasses import dataclass

from dask_p2p.errors import P2PError

__all__ = ["AttemptEndedError", "Peer"]


class AttemptEndedError(P2PError):
    """The attempt that a member takes part in cannot go on, or has ended."""


@dataclass(frozen=True)
class Peer:
    """Another member, or this one.

    Parameters
    ----------
    worker
        Address of its worker.
    ticket
        Of its run: nobody else knows it.
    endpoint
        Where its links begin: `Links.endpoint`.
    """

    worker: str
    ticket: str
    endpoint: str
