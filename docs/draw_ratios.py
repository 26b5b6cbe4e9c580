"""Draws the picture of ratios in `benchmarks/README.md`: ``python docs/draw_ratios.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TARGET = RESULTS / "ratios.svg"
PANELS = {
    "four workers on two cores": (
        "redistributions/cpu-2-cores-quiet.json",
        "redistributions/cpu-2-cores-new-star.json",
    ),
    "two NVIDIA H200": (
        "redistributions/h200-x2-new-arrays.json",
        "redistributions/h200-x2-map-overlap.json",
        "redistributions/h200-x2-fftn-2048.json",
    ),
}
DASK = ("dask tasks", "dask p2p", "dask map_overlap")


def ratios(files: tuple[str, ...]) -> dict[str, float]:
    """Return the time of the fastest of Dask's methods over ours, by case; largest arrays."""
    times: dict[str, dict[str, float]] = {}
    for name in files:
        rows: list[dict[str, Any]] = json.loads(
            (RESULTS / name).read_text("utf-8")
        )["rows"]
        for row in sorted(rows, key=lambda row: row["matrix_bytes"]):
            if "median_s" in row:
                times.setdefault(row["case"], {})[row["way"]] = row[
                    "median_s"
                ]
    fastest = {
        case: [s for way, s in ways.items() if way in DASK]
        for case, ways in times.items()
    }
    return {
        case: min(fastest[case]) / times[case]["dask_p2p"]
        for case in times
        if fastest[case]
    }


def draw() -> Figure:
    """Return the figure: a panel for each machine, a bar for each case."""
    panels = {title: ratios(files) for title, files in PANELS.items()}
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    heights = [len(panel) for panel in panels.values()]
    all_axes = figure.subplots(
        len(panels), 1, sharex=True, height_ratios=heights
    )
    for axes, (title, panel) in zip(
        all_axes, panels.items(), strict=True
    ):
        cases = sorted(panel, key=panel.__getitem__)
        bars = axes.barh(
            cases, [panel[case] for case in cases], color="#d1495b"
        )
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.axvline(1, color="#222222", linewidth=1)
        axes.set_title(title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel(
        "times as fast as the faster of Dask's methods"
    )
    return figure


if __name__ == "__main__":
    # Fixed ids and no date: the same results give the same file.
    with mpl.rc_context({"svg.hashsalt": "dask-p2p", "font.size": 9.0}):
        draw().savefig(TARGET, metadata={"Date": None, "Creator": None})
