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


def ranges(wanted: bool) -> Callable[..., AbstractContextManager[Any]]:
    """Return what makes a context that is a range of this thread, named by the words it is given.

    It makes none unless nvtx is there, and an option wants them or a profiler is attached.
    """
    if wanted or any(os.environ.get(name) for name in _INJECTIONS):
        with suppress(ImportError):
            import nvtx

            return lambda *words: nvtx.annotate(" ".join(map(str, words)), domain=DOMAIN)
    return lambda *words: _NOTHING
