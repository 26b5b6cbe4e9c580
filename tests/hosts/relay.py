"""Takes packets between two new network devices, each some time later: a link with a delay.

``python relay.py NEAR FAR SECONDS`` prints "ready" when the devices are there; they go with it.
"""

import asyncio
import fcntl
import os
import struct
import sys
from contextlib import suppress

_TUNSETIFF = 0x400454CA
_TAP, _NO_HEADER = 0x0002, 0x1000
_FRAME_BYTES = 2**16


def tap(name):
    """Make a network device; return the file that has its packets."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    return file


def send(file, frame):
    """Write a packet; a link may lose one."""
    with suppress(OSError):
        os.write(file, frame)


async def relay(near, far, delay_s):
    """Take packets both ways, for ever."""
    loop = asyncio.get_running_loop()

    def take(source, target):
        with suppress(BlockingIOError):
            while frame := os.read(source, _FRAME_BYTES):
                loop.call_later(delay_s, send, target, frame)

    loop.add_reader(near, take, near, far)
    loop.add_reader(far, take, far, near)
    print("ready", flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(relay(tap(sys.argv[1]), tap(sys.argv[2]), float(sys.argv[3])))
