"""Rows as text, and as HTML: what a report looks like in a terminal, and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["html_table", "text_table"]


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows with their columns aligned: the first one to the left, the others to the right.

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
    """Return rows as a table in HTML, whose first row is the head."""
    head, *body = ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    head = head.replace("td>", "th>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
