"""Set before torch is imported, and inherited by the servers that tests start."""

from __future__ import annotations

import os

# Test models are tiny: a second thread only waits, and on a busy machine its spinning makes a step 50 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
