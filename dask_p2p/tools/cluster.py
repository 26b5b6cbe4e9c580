"""`local_cluster`: a cluster on this machine, with the fastest settings for this package."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import dask

from dask_p2p.backends import backend_named
from dask_p2p.errors import InputError, install_command
from dask_p2p.inputs import checked_count
from dask_p2p.plugins.registration import register_cluster
from dask_p2p.tools.keywords import started
from dask_p2p.types import Kind, LocalCluster

# For pools of other sizes than multiples of this, cudaIpcOpenMemHandle takes seconds (1.9 s for
# 42 GiB on an H200) instead of milliseconds. UCX maps the same memory, and takes the same time.
POOL_GRANULE_BYTES = 2 * 2**20

_FOR_GPUS = ("cupy", "dask_cuda")
# Workers import all that ranks need as they start, which takes longer than a gang.
_RANK_MODULES = ("dask_p2p.sections.gang.rank", "dask_p2p.sections.iterate.rank_loop")
# Dask removes a worker from its cluster, and stops the nanny, if the worker is not back this long
# after it was lost. The default of 15 s is less than a process with a GPU may take to start, and is
# not prolonged if the new process is lost too.
_LOST_WORKER = {"distributed": {"deploy": {"lost-worker-timeout": "5 minutes"}}}
_POOL_FRACTION = 0.8  # fraction of free GPU memory; CUDA contexts and other libraries need the rest


def usable_gpus() -> list[str]:
    """Return the GPUs that this process may use, by their names in ``CUDA_VISIBLE_DEVICES``.

    Empty without GPUs, a driver, CuPy or dask-cuda. Creates no CUDA context.
    """
    from importlib.util import find_spec

    if any(find_spec(name) is None for name in _FOR_GPUS):
        return []
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception:  # pynvml has an error class for each cause
        return []
    return _visible(os.environ.get("CUDA_VISIBLE_DEVICES"), count)


def _visible(setting: str | None, count: int) -> list[str]:
    """Parse ``CUDA_VISIBLE_DEVICES`` as CUDA does: an invalid name hides all later ones."""
    if setting is None:
        return [str(index) for index in range(count)]
    names: list[str] = []
    for name in (part.strip() for part in setting.split(",")):
        try:
            valid = 0 <= int(name) < count
        except ValueError:  # UUID of a GPU or a MIG instance
            valid = name.startswith(("GPU-", "MIG-"))
        if not valid:
            break
        names.append(name)
    return names


def device_names(client: Any, kind: Kind) -> list[str]:
    """Return the name of each worker's GPU ("cupy") or processor ("numpy"), by address order."""
    names = client.run(lambda: backend_named(kind).device_name())
    return [names[address] for address in sorted(names)]


def local_cluster(
    n_workers: int | None = None, *, gpus: bool | None = None, **kwargs: Any
) -> LocalCluster:
    """Start a cluster on this machine, and register the plugins of this package.

    On GPUs it is a `dask_cuda.LocalCUDACluster` with one worker for each GPU. Dask's own messages
    use TCP, which schedules faster than UCX, and blocks move by CUDA IPC. CuPy allocates from an
    RMM pool whose size is a multiple of 2 MiB. On CPUs it is a `distributed.LocalCluster` of
    single-threaded worker processes over TCP.

    The default of Dask's ``distributed.deploy.lost-worker-timeout`` becomes five minutes in this
    process, so that a nanny has the time to restart a worker.

    Parameters
    ----------
    n_workers : int, optional
        Number of workers. Default: one for each GPU, or four on CPUs.
    gpus : bool, optional
        Whether workers use GPUs. Default: True if there is more than one usable GPU.
    **kwargs
        Arguments for the cluster's class, its nannies and workers, which override the settings
        above.

    Returns
    -------
    dask_cuda.LocalCUDACluster or distributed.LocalCluster
        The cluster, which is a context manager.

    Raises
    ------
    InputError
        If `n_workers` is not a positive integer, or there are fewer usable GPUs than workers. If
        no class takes a keyword. No process has started then.
    MissingPackageError
        If `protocol` names UCX, and the package distributed-ucxx is missing.
    RegistrationError
        As for `register`. The cluster has been closed then.
    StartError
        If a script starts a cluster whenever it is imported, as each worker imports it. Start the
        cluster below ``if __name__ == "__main__":``.
    """
    usable = usable_gpus() if gpus is not False else []
    if gpus is None:
        gpus = len(usable) > 1
    if n_workers is not None:
        n_workers = checked_count("workers", n_workers=n_workers)
    dask.config.update_defaults(_LOST_WORKER)
    if gpus:
        return _registered(_gpu_cluster(n_workers, usable, kwargs))
    from distributed import LocalCluster

    options: dict[str, Any] = {
        "n_workers": 4 if n_workers is None else n_workers,
        "threads_per_worker": 1,
        "processes": True,
        "protocol": "tcp://",
        "dashboard_address": ":0",
    }
    return _registered(started(LocalCluster, options, kwargs))


def _registered(cluster: LocalCluster) -> LocalCluster:
    """Register the plugins with a cluster, unless it is asynchronous, and not started yet."""
    if not cluster.asynchronous:
        try:
            register_cluster(cluster)
        except BaseException:
            cluster.close()
            raise
    return cluster


def _gpu_cluster(n_workers: int | None, usable: list[str], kwargs: dict[str, Any]) -> LocalCluster:
    wanted = len(usable) if n_workers is None else n_workers
    if not usable or wanted > len(usable):
        raise _too_few_gpus(max(wanted, 1), len(usable))
    from dask_cuda import LocalCUDACluster

    options: dict[str, Any] = {
        "CUDA_VISIBLE_DEVICES": usable[:wanted],
        "n_workers": wanted,
        "threads_per_worker": 1,
        "protocol": "tcp",
        "dashboard_address": ":0",
        "pre_import": ",".join(_RANK_MODULES),
    }
    if not kwargs.get("rmm_async") and not kwargs.get("rmm_managed_memory"):
        free_bytes = min(free_gpu_bytes(usable[:wanted]))
        options["rmm_pool_size"] = round_down(int(_POOL_FRACTION * free_bytes))
        options["rmm_allocator_external_lib_list"] = ["cupy"]
    return started(LocalCUDACluster, options, kwargs)


def _too_few_gpus(wanted: int, found: int) -> InputError:
    """Return the error, with the packages to install if some are missing."""
    from importlib.util import find_spec

    missing = [name for name in _FOR_GPUS if find_spec(name) is None]
    text = f"expected {wanted} usable GPU(s), found {found}"
    if missing:
        text += f", as there is no package {' and no '.join(missing)}"
        remedy = f"Run: {install_command('cuda13')}, or with a driver of CUDA 12 for [cuda12]"
    else:
        remedy = "Check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return InputError(f"{text}. {remedy}; or use CPU workers with gpus=False.")


def free_gpu_bytes(names: Iterable[str]) -> list[int]:
    """Return the free memory of each of these GPUs, given by names from `usable_gpus`."""
    import pynvml

    pynvml.nvmlInit()
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdecimal()
        else pynvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]
    return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles]


def round_down(size_bytes: int) -> int:
    """Return the largest valid pool size that is not above `size_bytes`."""
    return size_bytes // POOL_GRANULE_BYTES * POOL_GRANULE_BYTES
