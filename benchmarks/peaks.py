"""The most memory that workers take during a run."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # the kernel's command
_RETAINED_S = 5.0  # workers keep released blocks for 2 s, and then free memory for 2 s


def peak_bytes(client: Any, run: Callable[[], object]) -> int:
    """Return the peak of each worker's resident memory during a run, over its start, summed.

    Workers return free memory to the system first: a run would use it again, uncounted.
    """
    time.sleep(_RETAINED_S)
    start_bytes = client.run(_reset)
    run()
    peaks = client.run(_resident_bytes, "VmHWM")
    return int(sum(peaks[pid] - start_bytes[pid] for pid in start_bytes))


def _reset() -> int:
    """Return free memory to the system, and forget the peak; return the resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    return _resident_bytes("VmRSS")


def _resident_bytes(name: str) -> int:
    line = next(
        status_line
        for status_line in _STATUS.read_text().splitlines()
        if status_line.startswith(name)
    )
    return int(line.split()[1]) * 2**10
