"""The start of a cluster's processes: unknown keywords are refused, and failures explained."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from multiprocessing import current_process
from typing import Any

from dask_p2p.errors import InputError, StartError, needs
from dask_p2p.inputs import nearest
from dask_p2p.types import LocalCluster

# Keywords of workers that LocalCluster overwrites without a warning.
_OVERWRITTEN = {"nthreads": "threads_per_worker"}
_OF_GPUS = ("rmm_", "CUDA_", "device_memory_")  # keywords of LocalCUDACluster alone
# Of Dask's nannies: for the process of a worker, and in the error if that process ends early.
_NAME_OF_WORKERS = "Dask Worker process"
_ENDED = "Nanny failed to start"


def started(cluster_class: Any, own: Mapping[str, Any], given: Mapping[str, Any]) -> LocalCluster:
    """Start a cluster, with settings of `local_cluster` that the given keywords override.

    Raises `InputError` for an unknown keyword, `MissingPackageError` for UCX without its package,
    and `StartError` if workers end at their start.
    """
    options = {**own, **given}
    _check_keywords(cluster_class, options, {*given})
    if str(options.get("protocol", "")).startswith("ucx"):
        with needs("distributed_ucxx", "cuda13"):
            import_module("distributed_ucxx")
    try:
        return cluster_class(**options)
    except RuntimeError as exc:
        main = _main_program()
        if main is None or _ENDED not in str(exc):
            raise
        raise StartError(_explanation(main)) from None


def _explanation(main: str) -> str:
    """Return the message for workers that could not import the main program."""
    problem = f"expected workers that start, but their processes ended while they imported {main}"
    if not os.path.exists(main):
        return f"{problem}. Save the program in a file, and run that."
    return (
        f"{problem}, the main program. Each worker imports it: start the cluster below "
        '`if __name__ == "__main__":`. If it is below that line already, see the messages of the '
        "processes above."
    )


def refuse_in_imported_main(is_asynchronous: bool) -> None:
    """Raise if the caller runs while a new process imports the main program.

    Such a process may not start others. In a worker, `SystemExit` ends it without a message, since
    `started` raises the error in the main program, unless the cluster starts later.
    """
    process = current_process()
    if not getattr(process, "_inheriting", False):  # as multiprocessing checks it
        return
    if process.name.startswith(_NAME_OF_WORKERS) and not is_asynchronous:
        raise SystemExit(1)
    raise StartError(
        f"expected a program that other processes can import, but {_main_program()} starts a "
        'cluster then. Start it below `if __name__ == "__main__":`.'
    )


def _main_program() -> str | None:
    """Return the file of the program, also in a process that imports it; None in a notebook."""
    main = sys.modules.get("__mp_main__") or sys.modules["__main__"]
    return getattr(main, "__file__", None)


def _check_keywords(cluster_class: Any, options: Mapping[str, Any], given: set[str]) -> None:
    """Raise `InputError` for the first given keyword that no constructor takes.

    The parameters of a `worker_class` that is no class are unknown, and so are its keywords.
    """
    classes = _classes(cluster_class, options)
    if not all(isinstance(cls, type) for cls, _ in classes):
        return
    known = {name for cls, base in classes for name in _keywords(cls, base)}
    known = known - {*_OVERWRITTEN} | {"n_workers", "gpus"}
    has_gpus = cluster_class is not classes[0][1]
    for name in sorted(given - known):
        of_gpus = name.startswith(_OF_GPUS) and not has_gpus
        instead = "gpus" if of_gpus else _OVERWRITTEN.get(name) or nearest(name, known)
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
    for each in cls.__mro__:
        if "__init__" not in vars(each) or not issubclass(each, last):
            continue
        parameters = signature(vars(each)["__init__"]).parameters.values()
        kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        names.update(parameter.name for parameter in parameters if parameter.kind in kinds)
        passes_on = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
        if each is last or not passes_on:
            break
    return names - {"self", "scheduler_ip"}  # the cluster gives the address itself
