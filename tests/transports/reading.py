"""Reading of one block, region by region, as tests of transports do."""

from itertools import chain

import numpy as np

from dask_p2p.geometry import box_shape
from dask_p2p.transports.base import Request


class OneBlock:
    """A block of which each box is asked for on its own.

    With `is_eager` the first region is asked for at once: its error, if it has one, is raised.
    """

    def __init__(self, transport, request, options, is_eager=False):
        self.reading = transport.read([request], options)
        self._regions = iter(self.reading)
        self.confirm, self.close = self.reading.confirm, self.reading.close
        if is_eager:
            try:
                first = next(self._regions)
                if first.error is not None:
                    raise first.error
            except BaseException:
                self.close()
                raise
            self._regions = chain([first], self._regions)

    def request(self):
        return next(self._regions)

    def whole(self, to_numpy, timeout_s):
        """Return all that is left of one box, put together."""
        (box,) = self.reading.requests[0].boxes
        result = np.empty([max(0, n) for n in box_shape(box)], self.reading.requests[0].dtype)
        for region in self._regions:
            place = tuple(
                slice(start - low, stop - low)
                for (start, stop), (low, _) in zip(region.box, box, strict=True)
            )
            result[place] = to_numpy(region.result(timeout_s))
        return result


def open_block(transport, holder, key, shape, dtype, kind, boxes, options, **kwargs):
    request = Request(key, holder, shape, dtype, kind, list(boxes))
    return OneBlock(transport, request, options, **kwargs)
