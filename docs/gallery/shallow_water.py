"""Shallow water: spmd, halos of intermediate fields by ctx.pad."""

import dask
import dask.array as da
import numpy as np
from distributed import Client

import dask_p2p

G, DX, DT = 9.81, 5e3, 20.0
MID, NEXT, LAST = slice(1, -1), slice(2, None), slice(None, -2)
# Values beyond the walls: zero for arrays on northern faces.
WALLS = {"v": 0.0, "fn": 0.0}
WALLS |= dict.fromkeys(["h", "u", "fe", "q", "ke"], "nearest")


def rates(pad, h, u, v, f):
    """Return the rates of change; `pad` adds halos by name."""
    hh, uu, vv = pad({"h": h, "u": u, "v": v}).values()
    fe = 0.5 * (h + hh[MID, NEXT]) * u
    fn = 0.5 * (h + hh[NEXT, MID]) * v
    vorticity = (vv[MID, NEXT] - v) / DX - (uu[NEXT, MID] - u) / DX
    depth = h + hh[MID, NEXT] + hh[NEXT, MID] + hh[NEXT, NEXT]
    q = (f + vorticity) / (0.25 * depth)
    ke = 0.25 * (u**2 + uu[MID, LAST] ** 2 + v**2 + vv[LAST, MID] ** 2)
    halos = pad({"fe": fe, "fn": fn, "q": q, "ke": ke})
    east, north, qq, kk = halos.values()
    dh = -(fe - east[MID, LAST]) / DX - (fn - north[LAST, MID]) / DX
    du = -(G * (hh[MID, NEXT] - h) + kk[MID, NEXT] - ke) / DX
    du += 0.25 * q * (fn + north[MID, NEXT])
    du += 0.25 * qq[LAST, MID] * (north[LAST, MID] + north[LAST, NEXT])
    dv = -(G * (hh[NEXT, MID] - h) + kk[NEXT, MID] - ke) / DX
    dv -= 0.25 * q * (fe + east[NEXT, MID])
    dv -= 0.25 * qq[MID, LAST] * (east[MID, LAST] + east[NEXT, LAST])
    return dh, du, dv


def advanced(pad, fields, old, index, shape):
    """Return fields after a step of Adams and Bashforth, and rates."""
    f = 2e-4 + index[0] * DX * 2e-11
    new = rates(pad, *fields, f)
    is_inside = index[0] < shape[0] - 1  # the last faces are the wall
    h, u, v = (
        a + DT * (1.6 * b - 0.6 * c)
        for a, b, c in zip(fields, new, old, strict=True)
    )
    return (h, u, v * is_inside), new


def solve(ctx, h, u, v, steps):
    def pad(arrays):
        boundary = {k: {0: WALLS[k], 1: "periodic"} for k in arrays}
        return ctx.pad(arrays, 1, boundary)

    s = ctx.state(fields=(h, u, v), rates=(0 * h, 0 * h, 0 * h))
    for _ in ctx.steps(steps, s):
        s.fields, s.rates = advanced(
            pad, s.fields, s.rates, ctx.index, ctx.shape
        )
    return s.fields


def start(ny, nx):
    """Return a jet, the height that balances it, and small waves."""
    y, x = np.arange(ny)[:, None] / ny, np.arange(nx) / nx
    u = 10 * np.exp(-((y - 0.5) ** 2) / 0.04**2) + 0 * x
    h = 100 - np.cumsum(DX * u * 2e-4 / G, axis=0)
    return (
        h + 0.2 * np.sin(10 * np.pi * x) * np.cos(8 * np.pi * y),
        u,
        0 * u,
    )


def main(ny=32, nx=40, steps=30, compare=True):
    """Run it, and compare it with the same program in NumPy."""
    fields = start(ny, nx)
    arrays = [
        da.from_array(a, chunks=(ny // 4, nx // 2)) for a in fields
    ]
    result = dask.compute(
        *dask_p2p.spmd(solve, *arrays, outputs=3, steps=steps)
    )
    if compare:  # with the same in NumPy

        def pad(arrays):
            padded = {}
            for name, a in arrays.items():
                a = np.pad(a, ((0, 0), (1, 1)), "wrap")
                mode = "constant" if WALLS[name] == 0.0 else "edge"
                padded[name] = np.pad(a, ((1, 1), (0, 0)), mode)
            return padded

        old = [0 * a for a in fields]
        for _ in range(steps):
            fields, old = advanced(
                pad, fields, old, np.ogrid[:ny, :nx], (ny, nx)
            )
        assert all(map(np.array_equal, result, fields))
    return result


if __name__ == "__main__":
    with dask_p2p.local_cluster(2) as cluster, Client(cluster):
        main()
