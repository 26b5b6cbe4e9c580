"""`local_cluster`: a cluster on this machine, with the fastest settings for this package."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import dask

from dask_p2p.backends import backend_named
from dask_p2p.errors import ConfigError, InputError, install_command, needs
from dask_p2p.inputs import checked_count
from dask_p2p.plugins.registration import register_cluster
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
        If `n_workers` is not a positive integer, or there are fewer usable GPUs than workers.
    ConfigError
        As for `register`; the cluster has been closed then. If `protocol` names UCX, and the
        package distributed-ucxx is missing. If a script starts a cluster whenever it is imported,
        as each worker imports it: start it below ``if __name__ == "__main__":``.

    See Also
    --------
    register : Install the plugins on a cluster that another class starts.

    Examples
    --------
    >>> from dask_p2p import local_cluster
    >>> if __name__ == "__main__":  # doctest: +SKIP
    ...     with local_cluster(4) as cluster, cluster.get_client():
    ...         ...
    """
    usable = usable_gpus() if gpus is not False else []
    if gpus is None:
        gpus = len(usable) > 1
    if n_workers is not None:
        n_workers = checked_count("workers", n_workers=n_workers)
    dask.config.update_defaults(_LOST_WORKER)
    if gpus:
        return _gpu_cluster(n_workers, usable, kwargs)
    from distributed import LocalCluster

    options: dict[str, Any] = {
        "n_workers": 4 if n_workers is None else n_workers,
        "threads_per_worker": 1,
        "processes": True,
        "protocol": "tcp://",
        "dashboard_address": ":0",
    }
    return start_cluster(LocalCluster, options | kwargs)


def _gpu_cluster(n_workers: int | None, usable: list[str], kwargs: dict[str, Any]) -> LocalCluster:
    gpu_count = len(usable) if n_workers is None else n_workers
    if not usable or gpu_count > len(usable):
        raise _too_few_gpus(max(gpu_count, 1), len(usable))
    from dask_cuda import LocalCUDACluster

    options: dict[str, Any] = {
        "CUDA_VISIBLE_DEVICES": usable[:gpu_count],
        "n_workers": gpu_count,
        "threads_per_worker": 1,
        "protocol": "tcp",
        "dashboard_address": ":0",
        "pre_import": ",".join(_RANK_MODULES),
    }
    if not kwargs.get("rmm_async") and not kwargs.get("rmm_managed_memory"):
        free_bytes = min(free_gpu_bytes(usable[:gpu_count]))
        options["rmm_pool_size"] = round_down(int(_POOL_FRACTION * free_bytes))
        options["rmm_allocator_external_lib_list"] = ["cupy"]
    return start_cluster(LocalCUDACluster, options | kwargs)


def _too_few_gpus(gpu_count: int, usable_count: int) -> InputError:
    """Return the error, with the packages to install if some are missing."""
    from importlib.util import find_spec

    missing = [name for name in _FOR_GPUS if find_spec(name) is None]
    text = f"expected {gpu_count} usable GPU(s), found {usable_count}"
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


def start_cluster(cluster_class: Any, options: Mapping[str, Any]) -> LocalCluster:
    """Start a cluster, and register the plugins unless it is asynchronous, and not started yet.

    Raises `MissingPackageError` for UCX without its package, and `ConfigError` if workers could not
    import the main program.
    """
    from distributed import Nanny

    if str(options.get("protocol", "")).startswith("ucx"):
        with needs("distributed_ucxx", "cuda13"):
            import_module("distributed_ucxx")
    worker_class = options.get("worker_class") or Nanny
    is_nanny = not isinstance(worker_class, type) or issubclass(worker_class, Nanny)
    if options.get("processes", True) and is_nanny:
        check_main_program()
    cluster: LocalCluster = cluster_class(**options)
    if not cluster.asynchronous:
        try:
            register_cluster(cluster)
        except BaseException:
            cluster.close()
            raise
    return cluster


# Finds main programs that workers cannot import, before a cluster starts.
#
# Each worker process imports the main program. A script that starts a cluster whenever it is
# imported would do so in each worker, too. Python refuses that, and some releases of Dask then
# start workers again and again.

_PROBE = "dask_p2p: import of the main program"  # name of a process
_STARTS_A_CLUSTER = 77  # its exit status
_REMEDY = 'Move that code below `if __name__ == "__main__":`.'


def check_main_program() -> None:
    """Raise `ConfigError` if workers could not import the main program.

    If the main program does not name `__main__`, a process that imports it finds out. Another
    check, which the process passes, is fine.
    """
    from distributed.utils import get_mp_context

    process = current_process()
    main = sys.modules["__main__"]
    if getattr(process, "_inheriting", False):  # multiprocessing imports the main program now
        if process.name == _PROBE:
            raise SystemExit(_STARTS_A_CLUSTER)
        raise ConfigError(_text(sys.modules.get("__mp_main__", main).__file__))
    name = getattr(getattr(main, "__spec__", None), "name", None) or ""
    is_command = name == "__main__" or name.endswith(".__main__")  # python -m PACKAGE
    path = getattr(main, "__file__", None)  # notebooks have none
    if path is None or is_command or get_mp_context().get_start_method() == "fork":
        return  # new processes do not import it
    if not os.path.exists(path):
        raise ConfigError(
            f"expected a main program in a file, since workers import it, got {path}. Save it in a "
            "file, and run that."
        )
    if "__main__" not in Path(path).read_text(errors="replace"):
        _probe(path)


def _text(path: Any) -> str:
    return f"{path} starts a cluster when it is imported, and each worker imports it. {_REMEDY}"


def _probe(path: str) -> None:
    """Import the main program in a process, as workers do; raise `ConfigError` if that fails."""
    from distributed.utils import get_mp_context

    process = get_mp_context().Process(target=int, name=_PROBE)
    process.start()
    process.join()
    if process.exitcode == _STARTS_A_CLUSTER:
        raise ConfigError(_text(path))
    if process.exitcode:
        raise ConfigError(
            f"expected a program that workers can import, but the import of {path} failed with the "
            f"error above. Move code that workers cannot run below `if __name__ == "
            '"__main__":`.'
        )
