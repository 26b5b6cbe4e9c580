"""What a measurement was made on: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["environment"]

# By the names of their distributions; those with CUDA's version in them under each such name.
_PACKAGES = ("dask-p2p", "dask", "distributed", "numpy", "dask-cuda")
_CUDA_PACKAGES = ("cupy-cuda", "ucxx-cu", "rmm-cu", "libucx-cu")
_CUDA_MAJORS = ("13", "13x", "12", "12x")


def environment() -> dict[str, Any]:
    """Describe this machine and what is installed on it.

    Returns
    -------
    dict
        ``python``, ``platform``, ``cpu``, ``cpus`` (cores that can be used), ``gpus`` (names),
        ``driver``, ``versions`` (by package) and ``commit`` (None outside a git checkout).
    """
    gpus, driver = _gpus()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "driver": driver,
        "versions": _versions(),
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit that the package is at, if it lies in a git checkout; "+" if changed."""
    folder = os.path.dirname(os.path.abspath(__file__))
    git = ["git", "-C", folder]
    try:
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", os.path.basename(__file__)], capture_output=True
        )
        if tracked.returncode != 0:
            return None
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    except OSError:  # no git
        return None
    return head.stdout.strip() + ("+" if changed.stdout else "")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES + tuple(p + m for p in _CUDA_PACKAGES for m in _CUDA_MAJORS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line for line in file if line.startswith("model name")]
        return names[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return platform.processor()


def _gpus() -> tuple[list[str], str | None]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        return names, str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # pynvml is not there, or one of its many errors
        return [], None
