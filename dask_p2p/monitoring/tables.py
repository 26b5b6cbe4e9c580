"""Tables of runs, as text for a terminal and as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from dask.utils import format_bytes, format_time

if TYPE_CHECKING:
    from dask_p2p.monitoring.runs import Run


def cells(run: Run) -> dict[str, str]:
    """Return the cells of a run's row, by column. A cell that does not apply is empty."""
    blocks, is_section = " x ".join(map(str, run.blocks)) or "1", bool(run.latest)
    return {
        "operation": run.operation,
        "shape": " x ".join(map(str, run.shape)) or "one value",
        "dtype": run.dtype,
        "blocks": f"{blocks} ranks" if is_section else f"{len(run.made)} of {blocks}",
        "axes": "" if is_section else ",".join(map(str, run.axes)),
        "moved": format_bytes(run.moved_bytes),
        "least": "" if is_section else format_bytes(run.least_bytes),
        "exchange": "" if is_section else format_time(run.exchange_s),
        "wall": format_time(run.wall_s),
        "GB/s": "" if is_section else f"{run.gbs:.3g}",
        "transports": "" if is_section else _transports(run),
        "attempts": str(run.attempts),
        "fallbacks": str(len(run.fallbacks)),
        "steps": _steps(run),
        "waited": _waited(run) if is_section else "",
        "overlap": f"{run.overlap:.2f}" if run.overlap else "",
    }


def _steps(run: Run) -> str:
    """Return the ranks' steps and speed, and the number of the attempt from the second on."""
    steps = run.all_steps
    attempt = max((record.attempt for record in run.latest), default=0)
    text = f"{run.steps} of {steps}, {run.steps_per_s:.3g}/s" if steps else ""
    return ", ".join(filter(None, [text, f"attempt {attempt}" if attempt > 1 else ""]))


def _transports(run: Run) -> str:
    return ", ".join(f"{name} {pairs}" for name, pairs in run.transports.items()) or "-"


def _waited(run: Run) -> str:
    """Return the waits of the rank that waited longest: their share, and in a step."""
    share = f"{run.waited_share:.0%}"
    if not run.steps:
        return share
    return f"{share}, {max(r.waited_per_step_s for r in run.latest) * 1e3:.3g} ms a step"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows with aligned columns: the first one to the left, the others to the right.

    Examples
    --------
    >>> print(text_table([("name", "count"), ("a", "10")]))
    name  count
    a        10
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table in HTML. The first row is the head."""
    head, *body = ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    head = head.replace("td>", "th>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
