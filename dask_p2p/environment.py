"""What a measurement was made on: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any
from uuid import UUID

__all__ = ["commit", "cpu_name", "environment", "link_gbs", "on_gpu", "versions"]

# The names of the last four's distributions end in CUDA's version.
_PACKAGES = [
    "dask-p2p",
    "dask",
    "distributed",
    "numpy",
    "dask-cuda",
    "cupy",
    "ucxx",
    "libucx",
    "rmm",
]


def environment() -> dict[str, Any]:
    """Describe this machine and what is installed on it.

    Returns
    -------
    dict
        ``versions`` (see `versions`), ``commit`` (see `commit`) and ``hardware``: ``cpu``,
        ``cpu_count`` (cores that can be used), ``gpus`` (names), ``driver`` (None without one)
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


def on_gpu() -> bool:
    """Return whether this process is a worker that computes on a GPU, without loading anything.

    It has loaded CuPy, or dask-cuda made it; the latter may load CuPy with the first block only.
    """
    if "cupy" in sys.modules:
        return True
    return "dask_cuda" in sys.modules and find_spec("cupy") is not None


def link_gbs(uuid: bytes) -> float | None:
    """Return what all NVLinks of a GPU together should carry one way, GB (1e9 bytes) a second.

    Parameters
    ----------
    uuid : bytes
        Of the GPU, 16 of them.

    Returns
    -------
    float or None
        None without a driver, or without NVLinks.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        text = f"GPU-{UUID(bytes=uuid)}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(text)
        fields = [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        count, speed_mbs = (
            value.value.uiVal for value in pynvml.nvmlDeviceGetFieldValues(handle, fields)
        )
    except Exception:  # pynvml has an error class for each cause
        return None
    return count * speed_mbs / 1e3 or None


def versions() -> dict[str, str | None]:
    """Return the versions of what figures depend on; None for what is not installed."""
    installed = [
        ((d.metadata["Name"] or "").lower().replace("_", "-"), d.version) for d in distributions()
    ]
    result: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        pattern = re.compile(rf"{name}(-cu(da)?\d+x?)?")
        result[name] = next((v for n, v in installed if pattern.fullmatch(n)), None)
    return result


def commit() -> str | None:
    """Return the commit of the checkout that the package lies in, "-dirty" if it was changed.

    None if it is installed elsewhere, even into somebody else's checkout, or there is no git.
    """
    folder, file = os.path.split(os.path.abspath(__file__))
    tracked = _git(folder, "ls-files", "--error-unmatch", file)
    return tracked and _git(folder, "describe", "--always", "--abbrev=40", "--dirty")


def _git(folder: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def cpu_name() -> str:
    """Model of this machine's processor."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                label, _, value = line.partition(":")
                if label.strip() == "model name":
                    return value.strip()
    except OSError:  # no Linux
        pass
    return platform.processor() or platform.machine()


def _gpus() -> tuple[list[str], str | None]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        return names, str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # pynvml is not there, or one of its many errors
        return [], None
