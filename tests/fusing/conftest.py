from __future__ import annotations

from tests.sections.conftest import client as client
from tests.sections.conftest import gpu as gpu
