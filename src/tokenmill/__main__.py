"""`python -m tokenmill`: the same as the `tokenmill` command."""

from __future__ import annotations

import sys

from tokenmill.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
