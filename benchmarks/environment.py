"""The environment of a measurement: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import dask_p2p
from dask_p2p.backends.host import cpu_name, versions

__all__ = ["commit", "environment"]


def environment() -> dict[str, Any]:
    """Return the hardware, the software versions and the commit.

    Returns
    -------
    dict
        ``versions`` (see `versions`), ``commit`` (see `commit`) and ``hardware``: ``cpu``,
        ``cpu_count`` (usable cores), ``gpus`` (names), ``driver`` (None without one)
        and ``platform``.
    """
    gpus, driver = _gpus()
    return {
        "versions": versions(),
        "commit": commit(),
        "hardware": {
            "cpu": cpu_name(),
            "cpu_count": len(os.sched_getaffinity(0)),
            "gpus": gpus,
            "driver": driver,
            "platform": f"{platform.system()} {platform.machine()}",
        },
    }


def commit() -> str | None:
    """Return the commit of the package's checkout, with "-dirty" if it has changes.

    None without git, or if the package is installed elsewhere, even into another checkout.
    """
    folder, file = os.path.split(os.path.abspath(dask_p2p.__file__))
    tracked = _git(folder, "ls-files", "--error-unmatch", file)
    return tracked and _git(folder, "describe", "--always", "--abbrev=40", "--dirty")


def _git(folder: str, *arguments: str) -> str | None:
    try:
        process = subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return process.stdout.strip() or None if process.returncode == 0 else None


def _gpus() -> tuple[list[str], str | None]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        return names, str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # pynvml is missing, or raises one of its many errors
        return [], None
