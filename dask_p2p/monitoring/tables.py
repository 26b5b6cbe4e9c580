"""Tables of runs, as text for a terminal and as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from dask.utils import format_bytes

if TYPE_CHECKING:
    from dask_p2p.monitoring.runs import Run


def cells(run: Run) -> dict[str, str]:
    """Return the cells of a run's row, by column. A cell that does not apply is empty."""
    blocks, is_section = " x ".join(map(str, run.blocks)) or "1", bool(run.latest)
    return {
        "operation": run.operation,
        "state": "" if run.state == "done" else run.state,
        "shape": "" if run.shape is None else " x ".join(map(str, run.shape)) or "one value",
        "dtype": run.dtype,
        "blocks": f"{blocks} ranks" if is_section else f"{len(run.made)} of {blocks}",
        "axes": "" if is_section else ",".join(map(str, run.axes)),
        "moved": format_bytes(run.moved_bytes),
        "least": "" if is_section else format_bytes(run.least_bytes),
        "longest task": "" if is_section else format_duration(run.longest_task_s),
        "wall": format_duration(run.wall_s),
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
    text = f"{run.steps} of {steps}, mean {run.steps_per_s:.3g}/s" if steps else ""
    return ", ".join(filter(None, [text, f"attempt {attempt}" if attempt > 1 else ""]))


def _transports(run: Run) -> str:
    return ", ".join(f"{name} {pairs}" for name, pairs in run.transports.items()) or "-"


def _waited(run: Run) -> str:
    """Return the waits of the rank that waited longest: their share, and in a step."""
    if not run.steps:
        return f"{run.waited_share:.0%}"
    return waits_text(run.waited_share, max(r.waited_per_step_s for r in run.latest))


def waits_text(share: float, per_step_s: float) -> str:
    """Return the waits of a rank as text: the share of its time, and the time in a step."""
    return f"{share:.0%}, {format_duration(per_step_s)} per step"


def pace_text(steps: int, total: int, now_per_s: float, mean_per_s: float) -> str:
    """Return the steps of a section as text, with its speeds, and the time left at the speed now.

    Examples
    --------
    >>> pace_text(250, 1000, 50.0, 62.5)
    '250 of 1000 steps, now 50/s, mean 62.5/s, 15 s left'
    """
    parts = [f"{steps} of {total} steps" if total else f"{steps} steps"]
    if now_per_s:
        parts.append(f"now {now_per_s:.3g}/s")
    if mean_per_s:
        parts.append(f"mean {mean_per_s:.3g}/s")
    if now_per_s and steps < total:
        parts.append(f"{format_duration((total - steps) / now_per_s)} left")
    return ", ".join(parts)


def format_duration(seconds: float) -> str:
    """Return a duration as text, with three digits or two units.

    Examples
    --------
    >>> [format_duration(seconds) for seconds in (25e-6, 0.59456, 3.0, 226.68)]
    ['25 us', '595 ms', '3 s', '3m 47s']
    >>> [format_duration(seconds) for seconds in (0, 59.96, 954, 7_530, 180_000)]
    ['0 s', '1m 0s', '15m 54s', '2h 5m', '2d 2h']
    """
    for factor, unit in (1e6, "us"), (1e3, "ms"), (1, "s"):
        if 0 < (number := float(f"{seconds * factor:.3g}")) < (60 if unit == "s" else 1000):
            return f"{number:g} {unit}"
    if not seconds:
        return "0 s"
    minutes, remainder_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (remainder_s, "s")]
    first = next(number for number, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + 2])


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
