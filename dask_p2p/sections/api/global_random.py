"""NumPy's global random numbers, which the ranks in threads of one process share.

``np.random.seed`` of one rank changes the numbers of the others, so results depend on the ranks of
a process, and on the order in which they run. Nothing can give each thread a state of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from dask_p2p.errors import P2PWarning


@contextmanager
def warned_of_global_random(is_shared: bool) -> Iterator[None]:
    """Warn if the function of a rank draws NumPy's global random numbers.

    Parameters
    ----------
    is_shared : bool
        Whether other ranks run in this process.
    """
    before = _state() if is_shared else None
    yield
    if before is None or _state() == before:
        return
    from distributed import warn

    warn(
        "a function drew NumPy's global random numbers (np.random.seed, np.random.rand), which "
        "ranks in threads of one worker share: each rank gets other numbers in each run, and with "
        "other workers. Draw from a generator of the rank, np.random.default_rng((seed, "
        "ctx.rank)), or use workers of one thread.",
        P2PWarning,
    )


def _state() -> tuple[Any, ...]:
    """Return the state of NumPy's global random numbers, such that equal states compare equal."""
    state: Any = np.random.get_state()
    return tuple(each.tobytes() if isinstance(each, np.ndarray) else each for each in state)
