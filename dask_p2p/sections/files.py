"""Open files: each link to a member of another process takes one of those of its own.

Linux allows 1,024 by default, far below its own bounds. A process may raise that soft limit itself,
up to the hard one.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from math import inf

from dask_p2p.errors import SectionError

#: Connections at one listener of a member that have not shown whose they are.
MOST_STRANGERS = 32
_SPARE = 256  # for all else that a process opens while members run
_TOO_MANY = {errno.EMFILE, errno.ENFILE}
_REMEDY = (
    "Raise the hard limit (ulimit -Hn, LimitNOFILE= of a service, --ulimit nofile= of a "
    "container), or give the section fewer members."
)
_raising = threading.Lock()


def reserve_files(members: int, others: int) -> None:
    """Let this process open a file for each link of its members to those of other processes.

    Raises
    ------
    SectionError
        If the hard limit is below the files that are open already and these together.
    """
    with _raising:
        soft, hard = (_bound(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
        needed = len(os.listdir("/proc/self/fd")) + members * others
        if needed > hard:
            raise SectionError(
                f"expected room for {needed} open files in a worker's process, where {members} of "
                f"{members + others} members run, got a hard limit of {hard}. {_REMEDY}"
            )
        wanted = min(hard, needed + _SPARE + 2 * MOST_STRANGERS * members)
        if soft < wanted:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), most))


def check_files(exc: OSError) -> None:
    """Raise `SectionError` if an error of the system is that too many files are open here."""
    if exc.errno in _TOO_MANY:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise SectionError(
            f"expected room for one more open file in a worker's process, got a limit of {soft}: "
            f"{exc}. Close files that the function opens. {_REMEDY}"
        ) from exc


def _bound(limit: int) -> float:
    return inf if limit == resource.RLIM_INFINITY else limit
