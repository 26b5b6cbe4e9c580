"""`local_cluster`: a cluster on this machine, with the fastest settings for this package."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import dask

from dask_p2p.backends import backend_named
from dask_p2p.errors import ConfigError, InputError, install_command, needs
from dask_p2p.inputs import checked_count, nearest_name
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
    if any(importlib.util.find_spec(name) is None for name in _FOR_GPUS):
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
        cluster = _gpu_cluster(n_workers, usable, kwargs)
    else:
        from distributed import LocalCluster

        options = {"n_workers": n_workers or 4, "processes": True, "protocol": "tcp://"}
        cluster = start_cluster(LocalCluster, options, kwargs)
    if not cluster.asynchronous:  # else it has not started yet
        try:
            register_cluster(cluster)
        except BaseException:
            cluster.close()
            raise
    return cluster


def _gpu_cluster(n_workers: int | None, usable: list[str], kwargs: dict[str, Any]) -> LocalCluster:
    gpu_count = len(usable) if n_workers is None else n_workers
    if not usable or gpu_count > len(usable):
        missing = [name for name in _FOR_GPUS if importlib.util.find_spec(name) is None]
        text = f"expected {max(gpu_count, 1)} usable GPU(s), found {len(usable)}"
        if missing:
            text += f", as there is no package {' and no '.join(missing)}"
            remedy = f"Run: {install_command('cuda13')}, or with a driver of CUDA 12 for [cuda12]"
        else:
            remedy = "Check nvidia-smi and CUDA_VISIBLE_DEVICES"
        raise InputError(f"{text}. {remedy}; or use CPU workers with gpus=False.")
    from dask_cuda import LocalCUDACluster

    options: dict[str, Any] = {
        "CUDA_VISIBLE_DEVICES": usable[:gpu_count],
        "n_workers": gpu_count,
        "protocol": "tcp",
        "pre_import": ",".join(_RANK_MODULES),
    }
    if not kwargs.get("rmm_async") and not kwargs.get("rmm_managed_memory"):
        free_bytes = min(free_gpu_bytes(usable[:gpu_count]))
        options["rmm_pool_size"] = round_down(int(_POOL_FRACTION * free_bytes))
        options["rmm_allocator_external_lib_list"] = ["cupy"]
    return start_cluster(LocalCUDACluster, options, kwargs)


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


# Keywords of workers that LocalCluster overwrites without a warning.
_OVERWRITTEN = {"nthreads": "threads_per_worker"}
_OF_GPUS = ("rmm_", "CUDA_", "device_memory_")  # keywords of LocalCUDACluster alone


def start_cluster(
    cluster_class: Any, defaults: Mapping[str, Any], keywords: Mapping[str, Any]
) -> LocalCluster:
    """Start a cluster, with settings of `local_cluster` that the given keywords override.

    Raises `InputError` for an unknown keyword, `MissingPackageError` for UCX without its package,
    and `ConfigError` if workers could not import the main program.
    """
    options = {"threads_per_worker": 1, "dashboard_address": ":0", **defaults, **keywords}
    classes = _classes(cluster_class, options)
    _check_keywords(classes, {*keywords})
    if str(options.get("protocol", "")).startswith("ucx"):
        with needs("distributed_ucxx", "cuda13"):
            import_module("distributed_ucxx")
    if len(classes) > 2:  # with nannies, which start processes
        check_main_program()
    return cluster_class(**options)


def _check_keywords(classes: Sequence[tuple[type, type]], keywords: set[str]) -> None:
    """Raise `InputError` for the first given keyword that no constructor takes.

    The parameters of a `worker_class` that is no class are unknown, and so are its keywords.
    """
    if not all(isinstance(cls, type) for cls, _ in classes):
        return
    accepted = {name for cls, base in classes for name in _keywords(cls, base)}
    accepted = accepted - {*_OVERWRITTEN} | {"n_workers", "gpus"}
    has_gpus = classes[0][0] is not classes[0][1]
    for name in sorted(keywords - accepted):
        of_gpus = name.startswith(_OF_GPUS) and not has_gpus
        instead = "gpus" if of_gpus else _OVERWRITTEN.get(name) or nearest_name(name, accepted)
        remedy = "Add gpus=True, for workers with GPUs." if of_gpus else "Correct its name."
        raise InputError(
            f"expected a keyword of {', '.join(cls.__name__ for cls, _ in classes)}, got {name}; "
            f"the nearest is {instead}. {remedy}"
        )


def _classes(cluster_class: Any, options: Mapping[str, Any]) -> list[tuple[type, type]]:
    """Return the classes that get the keywords, each with the last base class that they reach."""
    from distributed import Nanny, Worker
    from distributed.core import Server
    from distributed.deploy.local import LocalCluster
    from distributed.utils import import_term

    node = options.get("worker_class") or (Nanny if options.get("processes", True) else Worker)
    inner: Any = Worker
    if isinstance(node, partial):
        inner = node.keywords.get("worker_class") or Worker
        node = node.func
    node, inner = (import_term(cls) if isinstance(cls, str) else cls for cls in (node, inner))
    classes = [(cluster_class, LocalCluster)]
    # A nanny passes its unknown keywords to the worker. LocalCUDACluster adds a nanny.
    if isinstance(node, type) and issubclass(node, Nanny):
        classes.append((node, Nanny))
        node = inner
    elif cluster_class is not LocalCluster:
        classes.append((Nanny, Nanny))
    return [*classes, (node, Server)]


def _keywords(cls: type, last: type) -> set[str]:
    """Return the keywords of a constructor, with those that it passes on to base classes.

    `last` is the last of these classes.
    """
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" not in vars(base) or not issubclass(base, last):
            continue
        parameters = signature(vars(base)["__init__"]).parameters.values()
        kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        names.update(parameter.name for parameter in parameters if parameter.kind in kinds)
        passes_on = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
        if base is last or not passes_on:
            break
    return names - {"self", "scheduler_ip"}  # the cluster gives the address itself


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

    If the main program does not check `__name__` before the call, a process that imports it finds
    out. Another check, which the process passes, is fine.
    """
    process = current_process()
    main = sys.modules["__main__"]
    if getattr(process, "_inheriting", False):  # multiprocessing imports the main program now
        if process.name == _PROBE:
            raise SystemExit(_STARTS_A_CLUSTER)
        raise ConfigError(_text(sys.modules.get("__mp_main__", main).__file__))
    path = _imported_file(main)
    if path is None:
        return
    if not os.path.exists(path):
        raise ConfigError(
            f"expected a main program in a file, since workers import it, got {path}. Save it in a "
            "file, and run that."
        )
    if _checks_name(main, path):
        return
    from distributed.utils import get_mp_context

    probe = get_mp_context().Process(target=int, name=_PROBE)  # imports it, as workers do
    probe.start()
    probe.join()
    if probe.exitcode == _STARTS_A_CLUSTER:
        raise ConfigError(_text(path))
    if probe.exitcode:
        raise ConfigError(
            f"expected a program that workers can import, but the import of {path} failed with the "
            f"error above. Move code that workers cannot run below `if __name__ == "
            '"__main__":`.'
        )


def _text(path: Any) -> str:
    return f"{path} starts a cluster when it is imported, and each worker imports it. {_REMEDY}"


def _imported_file(main: Any) -> str | None:
    from distributed.utils import get_mp_context

    name = getattr(getattr(main, "__spec__", None), "name", None) or ""
    is_command = name == "__main__" or name.endswith(".__main__")  # python -m PACKAGE
    if is_command or get_mp_context().get_start_method() == "fork":
        return None
    return getattr(main, "__file__", None)  # notebooks have none


def _checks_name(main: Any, path: str) -> bool:
    """Return whether the running statement of the main program is an `if` with `__name__`.

    Returns true as well if the statement is unknown, since another thread runs the main program.
    """
    frame: Any = sys._getframe()
    while frame is not None and not (
        frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"
    ):
        frame = frame.f_back
    if frame is None:
        return True
    try:
        statements = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return True
    running = [
        statement
        for statement in statements
        if statement.lineno <= frame.f_lineno <= (statement.end_lineno or 0)
    ]
    return not running or any(
        isinstance(part, ast.Name) and part.id == "__name__"
        for statement in running
        if isinstance(statement, ast.If)
        for part in ast.walk(statement.test)
    )
