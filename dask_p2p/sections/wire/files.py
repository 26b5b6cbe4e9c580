"""Open files: each connection to a rank in another process is one open file.

Linux allows 1,024 by default, far below its own bounds. A process may raise this soft limit itself,
up to the hard limit.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from math import inf

from dask_p2p.errors import SectionError

#: Limit of unidentified connections at one listener of a rank.
MOST_STRANGERS = 32
_SPARE = 256  # for all other files that a process opens while ranks run
_TOO_MANY = {errno.EMFILE, errno.ENFILE}
_REMEDY = (
    "Raise the hard limit (ulimit -Hn, LimitNOFILE= of a service, --ulimit nofile= of a "
    "container), or give the section fewer ranks, ranks=."
)
_raising = threading.Lock()


def reserve_files(ranks: int, others: int) -> None:
    """Raise the limit of open files for the connections of this process's ranks to others.

    Raises
    ------
    SectionError
        If the hard limit is too low for these connections and the files that are open already.
    """
    with _raising:
        soft, hard = (_file_limit(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
        needed = len(os.listdir("/proc/self/fd")) + ranks * others
        if needed > hard:
            raise SectionError(
                f"expected room for {needed} open files in a worker's process, where {ranks} of "
                f"{ranks + others} ranks run, got a hard limit of {hard}. {_REMEDY}"
            )
        wanted = min(hard, needed + _SPARE + 2 * MOST_STRANGERS * ranks)
        if soft < wanted:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), most))


def check_files(exc: OSError) -> None:
    """Raise `SectionError` if a system error means that too many files are open here."""
    if exc.errno in _TOO_MANY:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise SectionError(
            f"expected room for one more open file in a worker's process, got a limit of {soft}: "
            f"{exc}. Close files that the function opens. {_REMEDY}"
        ) from exc


def _file_limit(limit: int) -> float:
    return inf if limit == resource.RLIM_INFINITY else limit
