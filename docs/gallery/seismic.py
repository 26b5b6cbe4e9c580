"""A seismic shot: a source and receivers between points, a sponge."""

import dask
import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p
from dask_p2p import Points, Record

DX, DT, PEAK = 10.0, 1e-3, 15.0  # metres, seconds, hertz
OWN = slice(2, -2), slice(2, -2)


def ricker(t):
    a = (np.pi * PEAK * (t - 1 / PEAK)) ** 2
    return (1 - 2 * a) * np.exp(-a)


def laplacian(p):
    """Return the Laplacian of fourth order, from `p` with a halo."""
    curvature = -5.0 * p[OWN]
    for shift, weight in ((1, 4 / 3), (2, -1 / 12)):
        ahead = slice(2 + shift, shift - 2 or None)
        behind = slice(2 - shift, -2 - shift)
        curvature += weight * (p[ahead, 2:-2] + p[behind, 2:-2])
        curvature += weight * (p[2:-2, ahead] + p[2:-2, behind])
    return curvature / DX**2


def advanced(now, before, speed, damping):
    """Return the pressure after a step."""
    new = 2 * now[OWN] - (1 - damping) * before
    return (new + (speed * DT) ** 2 * laplacian(now)) / (1 + damping)


def wave(p, speed, damping, source, at):
    now, before = p
    new = advanced(now, before[OWN], speed, damping)
    source.add(new, ricker(at.step * DT))
    return {"p": new}


def heard(p, receivers):
    """Return this rank's part of the pressure at the receivers."""
    return receivers.sample(p[0])


def rock(ny, nx):
    """Return the speed of sound, and the damping at the rim."""
    y, x = np.ogrid[:ny, :nx]
    speed = np.where(y < ny // 2, 1500.0, 2500.0) + 0 * x
    inwards = np.minimum(
        np.minimum(y, ny - 1 - y), np.minimum(x, nx - 1 - x)
    )
    return speed, 0.3 * (1 - np.minimum(inwards / 20, 1)) ** 2


def main(ny=40, nx=60, steps=80, compare=True):
    """Run it, and compare it with the same program in NumPy."""
    speed, damping = rock(ny, nx)
    shot = np.array([[ny // 4 + 0.5], [nx // 2]])
    line = np.stack([np.full(12, 5), np.linspace(4, nx - 5, 12)])
    zero_pressure = da.zeros((ny, nx), chunks=(ny // 2, nx // 2))
    lazy = dask_p2p.iterate(
        wave,
        {"p": [zero_pressure, zero_pressure]},
        depth=2,
        steps=steps,
        boundary=0.0,
        constants={
            "speed": speed,
            "damping": damping,
            "source": Points(shot),
            "receivers": Points(line),
        },
        record={"traces": Record(heard, shape=(12,))},
    )
    (result,) = dask.compute(lazy)
    if compare:  # with the same in NumPy
        p, before = np.zeros((ny, nx)), np.zeros((ny, nx))
        low, share = np.floor(line[1]).astype(int), line[1] % 1
        traces = []
        for step in range(steps):
            new = advanced(np.pad(p, 2), before, speed, damping)
            new[ny // 4 : ny // 4 + 2, nx // 2] += 0.5 * ricker(
                step * DT
            )
            p, before = new, p
            traces.append(
                (1 - share) * p[5, low] + share * p[5, low + 1]
            )
        np.testing.assert_allclose(result["p"][0], p, atol=1e-12)
        np.testing.assert_allclose(result["traces"], traces, atol=1e-12)
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
