"""The environment of this process: host, CPU, GPU, links, and versions that affect speed."""

from __future__ import annotations

import os
import platform
import re
import sys
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from uuid import UUID

# The distributions of the last four have names that end in CUDA's version.
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


@cache
def kernel_and_namespace() -> tuple[str, str]:
    """Return the boot id of the Linux kernel, and the process's PID namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.readlink("/proc/self/ns/pid")


def on_gpu() -> bool:
    """Return true if this process computes on a GPU, without loading a library.

    It has loaded CuPy, or dask-cuda started it; then it may load CuPy with its first block.
    """
    if "cupy" in sys.modules:
        return True
    return "dask_cuda" in sys.modules and find_spec("cupy") is not None


def link_gbs(uuid: bytes) -> float | None:
    """Return the nominal rate of all NVLinks of a GPU one way, GB (1e9 bytes) a second.

    None without a driver or without NVLinks. The UUID has 16 bytes.
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
    """Return the versions of packages that affect measurements; None if not installed."""
    installed = [
        ((d.metadata["Name"] or "").lower().replace("_", "-"), d.version) for d in distributions()
    ]
    result: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        pattern = re.compile(rf"{name}(-cu(da)?\d+x?)?")
        result[name] = next((v for n, v in installed if pattern.fullmatch(n)), None)
    return result


def cpu_name() -> str:
    """Return the model of this machine's CPU."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                label, _, value = line.partition(":")
                if label.strip() == "model name":
                    return value.strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()
