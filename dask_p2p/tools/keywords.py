"""The start of a cluster, after checks of its keywords and of the main program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from dask_p2p.errors import InputError, needs
from dask_p2p.inputs import nearest
from dask_p2p.tools.main_guard import check_main_program
from dask_p2p.types import LocalCluster

# Keywords of workers that LocalCluster overwrites without a warning.
_OVERWRITTEN = {"nthreads": "threads_per_worker"}
_OF_GPUS = ("rmm_", "CUDA_", "device_memory_")  # keywords of LocalCUDACluster alone


def started(cluster_class: Any, own: Mapping[str, Any], given: Mapping[str, Any]) -> LocalCluster:
    """Start a cluster, with settings of `local_cluster` that the given keywords override.

    Raises `InputError` for an unknown keyword, `MissingPackageError` for UCX without its package,
    and `StartError` if workers could not import the main program.
    """
    options = {**own, **given}
    classes = _classes(cluster_class, options)
    _check_keywords(classes, {*given})
    if str(options.get("protocol", "")).startswith("ucx"):
        with needs("distributed_ucxx", "cuda13"):
            import_module("distributed_ucxx")
    if len(classes) > 2:  # with nannies, which start processes
        check_main_program()
    return cluster_class(**options)


def _check_keywords(classes: Sequence[tuple[type, type]], given: set[str]) -> None:
    """Raise `InputError` for the first given keyword that no constructor takes.

    The parameters of a `worker_class` that is no class are unknown, and so are its keywords.
    """
    if not all(isinstance(cls, type) for cls, _ in classes):
        return
    known = {name for cls, base in classes for name in _keywords(cls, base)}
    known = known - {*_OVERWRITTEN} | {"n_workers", "gpus"}
    has_gpus = classes[0][0] is not classes[0][1]
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
