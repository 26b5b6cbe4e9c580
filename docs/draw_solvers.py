"""Computes and draws the pictures of the gallery: ``PYTHONPATH=. python docs/draw_solvers.py``.

Arguments are names of pictures, by default all. The programs run on more points and for more steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import dask_p2p

GALLERY = Path(__file__).parent / "gallery"
IMAGES = Path(__file__).parent / "images"


def names_of(program: str) -> dict[str, Any]:
    """Return the names of a program."""
    names: dict[str, Any] = {"__name__": program}
    exec((GALLERY / f"{program}.py").read_text(), names)
    return names


def computed(program: str, **values: int) -> Any:
    """Run a program with other values of some numbers; return its result."""
    return names_of(program)["main"](**values, compare=False)


def gray_scott() -> Any:
    """Return a pattern of Gray and Scott."""
    return computed("gray_scott", n=256, steps=12_000)["v"]


def shallow_water() -> Any:
    """Return the vorticity of a jet."""
    _, u, v = computed("shallow_water", ny=128, nx=256, steps=9_000)
    return np.gradient(v, axis=1) - np.gradient(u, axis=0)


def cylinder() -> Any:
    """Return the vorticity behind a cylinder."""
    names = names_of("cylinder")
    result = names["main"](80, 240, 10_000, compare=False)
    _, ux, uy = names["velocity"](result)
    vorticity = np.gradient(uy, axis=1) - np.gradient(ux, axis=0)
    return np.where(names["cylinder"](80, 240), 0, vorticity).clip(
        -0.02, 0.02
    )


def elastic() -> Any:
    """Return the velocity along axis 1 of elastic waves."""
    vx = computed("elastic", n=200, steps=800)["vx"]
    limit = abs(vx).max() / 2
    return vx.clip(-limit, limit)


def turbulence() -> Any:
    """Return the vorticity of a periodic flow."""
    return computed("turbulence", n=192, steps=1_000)["w"]


def tracer() -> Any:
    """Return a tracer in a stream."""
    return computed("tracer", ny=80, nx=240, steps=1_500)


def lanczos() -> Any:
    """Draw the eigenvalues of the small matrix by the number of steps."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        figsize=(5, 3.5), layout="constrained"
    )
    for count in range(2, 61, 2):
        values = computed("lanczos", n=96, count=count)
        axes.plot(
            [count] * count, values, "_", color="tab:blue", markersize=4
        )
    axes.set(xlabel="steps", ylabel="eigenvalues of the small matrix")
    figure.savefig(IMAGES / "lanczos.png", dpi=100)


def seismic() -> Any:
    """Return the pressure of a shot above a boundary between rocks."""
    result = computed("seismic", ny=200, nx=300, steps=500)
    pressure = result["p"][0][::-1]
    limit = abs(pressure).max() / 2
    return pressure.clip(-limit, limit)


def spins() -> Any:
    """Return spins after a quench."""
    return computed("spins", n=256, steps=200)["s"]


def multigrid() -> Any:
    """Return the potential of charges."""
    u = computed("multigrid", n=256, cycles=10)["u"]
    limit = np.percentile(abs(u), 99)
    return u.clip(-limit, limit)


def particles() -> Any:
    """Return the logarithm of the density of particles."""
    result = computed("particles", count=1_000_000, steps=12)
    _, x, y = result["particles"].T
    return np.log1p(np.histogram2d(x, y, 320, [(0, 1), (0, 1)])[0])


def life() -> Any:
    """Return the cells after many steps, enlarged."""
    cells = computed("life", n=160, steps=500)["cells"]
    return cells.repeat(2, 0).repeat(2, 1)


#: By name of a picture: the function that computes it, and its colours.
PICTURES: dict[str, tuple[Callable[[], Any], str]] = {
    "gray-scott": (gray_scott, "viridis"),
    "shallow-water": (shallow_water, "RdBu_r"),
    "cylinder": (cylinder, "RdBu_r"),
    "elastic": (elastic, "RdBu_r"),
    "turbulence": (turbulence, "RdBu_r"),
    "tracer": (tracer, "viridis"),
    "lanczos": (lanczos, ""),
    "seismic": (seismic, "RdBu_r"),
    "spins": (spins, "cividis"),
    "multigrid": (multigrid, "RdBu_r"),
    "particles": (particles, "magma"),
    "life": (life, "binary"),
}


def main() -> None:
    """Draw the pictures with these names."""
    from matplotlib import pyplot

    IMAGES.mkdir(exist_ok=True)
    with Client(dask_p2p.local_cluster(2)) as client:
        for name in sys.argv[1:] or PICTURES:
            function, colours = PICTURES[name]
            picture = function()
            if picture is not None:
                path = IMAGES / f"{name}.png"
                pyplot.imsave(
                    path, picture, cmap=colours, origin="lower"
                )
        client.close()


if __name__ == "__main__":
    main()
