"""Exits with 0 if the container's scheduler or worker answers, else with 1."""

from __future__ import annotations

import os
import sys
from urllib.error import URLError
from urllib.request import urlopen

try:
    # The dashboard port of both scheduler and worker.
    with urlopen(f"http://127.0.0.1:{os.environ.get('HEALTH_PORT', '8787')}/health", timeout=4):
        pass
except URLError as exc:
    sys.exit(f"expected an answer from the dashboard's port, got: {exc.reason}")
