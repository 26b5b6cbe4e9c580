"""The connections of a rank that is alone in its section: none. Exchanges return immediately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask_p2p.sections.wire.connections import Connections


class OneRank(Connections):
    """The connections of a rank without other ranks. It has no endpoint and no state."""

    is_alone, has_company = True, False
    rank_and_size = 0, 1
    hosts = [""]  # noqa: RUF012

    def __init__(self) -> None:
        self._connections, self._found = {}, None
        self._is_woken, self._failure, self.use_ucx = False, "", False

    def begin(self, *call: Any, **kwargs: Any) -> Callable[[], dict[int, memoryview]]:
        """Return a function that returns the empty result."""
        return dict


#: The connections of all sections with one rank.
ONE_RANK = OneRank()
