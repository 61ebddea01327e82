"""Python runs this at the start of each process that has this folder in PYTHONPATH: torch cannot be imported there."""

import sys

sys.modules["torch"] = None
