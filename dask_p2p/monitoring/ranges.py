"""NVTX ranges for NVIDIA's profilers: the activities of a task's thread, by holder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any

from dask_p2p.errors import install_command

logger = logging.getLogger(__name__)

#: NVTX domain of all ranges of this package.
DOMAIN = "dask_p2p"

# Environment variables that load a profiler into a process, Nsight Systems for example.
_INJECTIONS = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")
_NOTHING = nullcontext()


def ranges(wanted: bool) -> Callable[..., AbstractContextManager[Any]]:
    """Return a function that makes a range of this thread, a context named by its arguments.

    Ranges are made if nvtx is installed, and an option requests them or a profiler is attached.
    Otherwise the function returns an empty context. If only nvtx is missing, the first call logs a
    warning.
    """
    if wanted or any(os.environ.get(name) for name in _INJECTIONS):
        with suppress(ImportError):
            import nvtx

            return lambda *words: nvtx.annotate(" ".join(map(str, words)), domain=DOMAIN)
        _warn()
    return lambda *words: _NOTHING


@cache  # once a process
def _warn() -> None:
    logger.warning("dask_p2p: no NVTX ranges without nvtx. Run: %s", install_command("nvtx"))
