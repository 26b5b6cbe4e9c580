"""Ranges that NVIDIA's profilers show: what a task's thread does for which holder."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

#: Of NVTX, by which a profiler tells these ranges from others.
DOMAIN = "dask_p2p"

# By which a profiler, Nsight Systems for one, is loaded into a process.
_INJECTIONS = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")
_NOTHING = nullcontext()


class Ranges:
    """Makes ranges, if nvtx is there and an option wants them or a profiler is attached."""

    def __init__(self, wanted: bool) -> None:
        self._annotate: Callable[..., AbstractContextManager[Any]] | None = None
        if wanted or any(os.environ.get(name) for name in _INJECTIONS):
            with suppress(ImportError):
                import nvtx

                self._annotate = nvtx.annotate

    def __call__(self, *words: Any) -> AbstractContextManager[Any]:
        """Return a context that is a range of this thread, named by these words."""
        if self._annotate is None:
            return _NOTHING
        return self._annotate(" ".join(map(str, words)), domain=DOMAIN)
