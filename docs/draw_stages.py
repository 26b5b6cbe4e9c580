"""Draws the picture of the stages: ``python docs/draw_stages.py``."""

from __future__ import annotations

from pathlib import Path

__all__ = ["picture"]

TARGET = Path(__file__).parent / "images" / "stages.svg"

WORKERS = 4
CELL = 30
PANEL = WORKERS * CELL
GAP = 34
LEFT, TOP = 78, 58
WIDTH, HEIGHT = LEFT + 6 * (PANEL + GAP), TOP + PANEL + 50

# By worker; readable for colour-blind people (Okabe and Ito). The picture is legible on white and
# on black: text is grey, and dark frames have a white outline.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #737d88; text-anchor: middle }
  .title { font-weight: 600 } .row { text-anchor: end }
  .cell { fill: none; stroke: #8c959f; stroke-width: 1 }
  .new { fill: none; stroke: #24292f; stroke-width: 2.5 }
  .halo { fill: none; stroke: #ffffff; stroke-width: 6 }
"""


def picture() -> str:
    """Return the picture as SVG: the input, the output after each stage, and captions."""
    panels = [
        _panel(
            0,
            "x",
            "one row slab a worker",
            lambda r, _: r,
            lambda r, c: False,
        )
    ]
    for stage in range(WORKERS):
        source = (
            "its own tile" if stage == 0 else f"from worker r + {stage}"
        )
        panels.append(
            _panel(
                stage + 1,
                f"stage {stage}",
                source,
                # Worker r now has the tiles of r, r + 1, ..., r + stage.
                lambda r, c, s=stage: (
                    c if (c - r) % WORKERS <= s else None
                ),
                lambda r, c, s=stage: (c - r) % WORKERS == s,
            )
        )
    panels.append(
        _panel(
            5,
            "x.T",
            "one row slab a worker",
            lambda _, c: c,
            lambda r, c: False,
        )
    )
    rows = [
        f'<text class="row" x="{LEFT - 10}" y="{TOP + r * CELL + 20}">worker {r}</text>'
        for r in range(WORKERS)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            "<title>A transpose of four row slabs in four stages: in each, every worker gets one "
            "tile from one worker, each from another.</title>",
            f"<style>{STYLE}</style>",
            *rows,
            *panels,
            "</svg>\n",
        ]
    )


def _panel(place, title, text, holder, is_new) -> str:
    """Draw a matrix of tiles, each in the colour of the worker whose slab it comes from."""
    left_edge = LEFT + place * (PANEL + GAP)
    middle = left_edge + PANEL / 2
    parts = [
        f'<text class="title" x="{middle:g}" y="{TOP - 14}">{title}</text>',
        f'<text x="{middle:g}" y="{TOP + PANEL + 24}">{text}</text>',
    ]
    new = []
    for r in range(WORKERS):
        for c in range(WORKERS):
            box = f'x="{left_edge + c * CELL}" y="{TOP + r * CELL}" width="{CELL}" height="{CELL}"'
            if (holder_rank := holder(r, c)) is not None:
                parts.append(
                    f'<rect {box} fill="{COLOURS[holder_rank]}"/>'
                )
            parts.append(f'<rect class="cell" {box}/>')
            if is_new(r, c):
                new.append(box)
    frames = [
        f'<rect class="{kind}" {box}/>'
        for kind in ("halo", "new")
        for box in new
    ]
    return "\n".join([*parts, *frames])


if __name__ == "__main__":
    TARGET.write_text(picture(), "utf-8")
