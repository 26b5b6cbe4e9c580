"""Information from the CUDA driver about GPUs and memory.

Functions import CUDA's packages; the import of this module does not.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

from dask_p2p.errors import TransferError, install_command

MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the driver derives the direction from the addresses


@cache
def driver() -> Any:
    """Return cuda-bindings' driver API; None if it or the driver is not installed."""
    try:
        from cuda.bindings import driver as api

        api.cuDriverGetVersion()
    except Exception:  # each missing component has its own error class
        return None
    return api


@cache
def uuid(device: int) -> bytes:
    """Return the UUID of a GPU, 16 bytes; empty if it is unknown.

    CuPy truncates a UUID at its first zero byte, which one UUID in sixteen has.
    """
    with suppress(Exception):  # not installed, or one of the driver's many errors
        from cuda.bindings import driver as api

        error, number = api.cuDeviceGet(device)
        if error == api.CUresult.CUDA_SUCCESS:
            # In CUDA 12 only the second version returns the UUIDs of MIG instances.
            get_uuid = getattr(api, "cuDeviceGetUuid_v2", None) or api.cuDeviceGetUuid
            error, result = get_uuid(number)
            if error == api.CUresult.CUDA_SUCCESS:
                return bytes(result.bytes)
    return b""


def is_shareable(address: int) -> bool:
    """Return false if CUDA IPC is known to be unable to share memory with other processes.

    It cannot share managed memory, or memory of `cudaMallocAsync`.
    """
    with suppress(TransferError):
        return bool(_attribute(driver(), "IS_LEGACY_CUDA_IPC_CAPABLE", address))
    return True


def is_managed(address: int) -> bool:
    """Return true if memory is managed: its pages move to the processor that touches them."""
    with suppress(TransferError):
        return bool(_attribute(driver(), "IS_MANAGED", address))
    return False


def buffer_id(address: int) -> int:
    """Return the id, unique in this process, of the allocation that memory belongs to.

    Raises `ImportError` without cuda-bindings, and `TransferError` if the driver does not report
    the id.
    """
    from cuda.bindings import driver as api

    return int(_attribute(api, "BUFFER_ID", address))


def allocation(address: int) -> tuple[int, int]:
    """Return the address and the size in bytes of the allocation that memory belongs to.

    Raises the errors of `buffer_id`.
    """
    from cuda.bindings import driver as api

    start, size = "RANGE_START_ADDR", "RANGE_SIZE"
    return int(_attribute(api, start, address)), int(_attribute(api, size, address))


def close_ipc(address: int) -> None:
    """Close a mapping of another process's memory, made by `cudaIpcOpenMemHandle`.

    The driver may wait for all work on the device, which may wait for another thread of this
    process. CuPy's function would hold the interpreter lock, and block that thread.
    """
    import cupy

    runtime, api = cupy.cuda.runtime, driver()
    if api is not None:
        runtime.memGetInfo()  # sets the device's context in a thread that is new to it
        (error,) = api.cuIpcCloseMemHandle(address)
        if error == api.CUresult.CUDA_SUCCESS:
            return
    runtime.ipcCloseMemHandle(address)


def _attribute(api: Any, name: str, address: int) -> Any:
    """Return an attribute of memory; `TransferError` if the driver does not report it."""
    if api is None:
        raise TransferError(f"cuda-bindings is needed for {name}; {install_command('cuda13')}")
    attribute = getattr(api.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    error, value = api.cuPointerGetAttribute(attribute, address)
    if error != api.CUresult.CUDA_SUCCESS:
        raise TransferError(f"the CUDA driver does not report {attribute.name}: {error.name}")
    return value
