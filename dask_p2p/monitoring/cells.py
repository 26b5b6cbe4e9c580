"""A run as a row of a table: what `last_runs` prints, and the page shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask.utils import format_bytes, format_time

if TYPE_CHECKING:
    from dask_p2p.monitoring.runs import Run

__all__ = ["OF_SOME", "cells"]

#: Columns that only runs of `iterate`, `spmd` and `map_on_gpu` have something for.
OF_SOME = ("steps", "waited", "overlap")


def cells(run: Run) -> dict[str, str]:
    """Return a row of the table, by column."""
    done = f"{len(run.made)} of {' x '.join(map(str, run.blocks)) or 1}"
    return {
        "operation": run.operation,
        "shape": " x ".join(map(str, run.shape)) or "one value",
        "dtype": run.dtype,
        "blocks": done,
        "axes": ",".join(map(str, run.axes)),
        "moved": format_bytes(run.moved_bytes),
        "least": format_bytes(run.least_bytes),
        "exchange": format_time(run.exchange_s),
        "wall": format_time(run.wall_s),
        "GB/s": f"{run.gbs:.3g}",
        "transports": ", ".join(f"{name} {pairs}" for name, pairs in run.transports.items()) or "-",
        "attempts": str(run.attempts),
        "fallbacks": str(len(run.fallbacks)),
        "steps": _steps(run),
        "waited": f"{run.waited_share:.0%}" if run.latest else "",
        "overlap": f"{run.overlap:.2f}" if run.overlap else "",
    }


def _steps(run: Run) -> str:
    """Return how far members are, or were, and in which attempt if that is not the first."""
    steps = max((record.steps for record in run.latest), default=0)
    attempt = max((record.attempt for record in run.latest), default=0)
    text = f"{run.steps} of {steps}, {run.steps_per_s:.3g}/s" if steps else ""
    return ", ".join(filter(None, [text, f"attempt {attempt}" if attempt > 1 else ""]))
