from __future__ import annotations

from tests.sections.conftest import gpu as gpu
