"""What `demo` and `bench` share: our ways and Dask's, each on the cluster where it is quickest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dask_p2p.cli._options import Site, start

if TYPE_CHECKING:
    from dask_p2p.measure import Runs, Way

__all__ = ["measure_on", "rival_ways"]


def rival_ways(site: Site, methods: Sequence[str]) -> dict[str, Way]:
    """Return Dask's own ways by a name that says the method, and the protocol if it is another."""
    from dask_p2p.measure import dask_rechunk

    suffix = " over UCX" if _rival_protocol(site) else ""
    return {f'Dask "{method}"{suffix}': dask_rechunk(method) for method in methods}


def _rival_protocol(site: Site) -> str | None:
    """On GPUs Dask's own ways are quickest over UCX; this package's do not depend on it."""
    if not site.gpus or site.scheduler is not None:
        return None
    return "ucx" if find_spec("distributed_ucxx") is not None else None


def measure_on(
    site: Site,
    ours: Mapping[str, Way],
    rivals: Mapping[str, Way],
    make: Callable[[], Any],
    axes: tuple[int, ...],
    repeats: int,
    check: Callable[[Any], int],
    started: Callable[[Any], Callable[[], None]],
    one_by_one: Collection[str] = (),
) -> list[Runs]:
    """Start what clusters are needed, and measure on them.

    Parameters
    ----------
    site : Site
    ours, rivals, make, axes, repeats, check, one_by_one
        See `dask_p2p.measure.compare`.
    started : callable
        Called with the client of the first cluster, before anything is measured; returns what is
        to be called after each run.
    """
    from dask_p2p.measure import compare

    protocol = _rival_protocol(site)
    here: Mapping[str, Way] = {} if protocol else rivals
    with start(site) as client:
        progress = started(client)
        measured = compare(client, ours, here, make, axes, repeats, check, progress, one_by_one)
    if protocol and rivals:
        with start(site, protocol=protocol) as client:
            measured += compare(client, {}, rivals, make, axes, repeats, check, progress)
    return measured
