"""`python -m tokenmill`: the same as the `tokenmill` command."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # -m puts the current folder first, where another torch.py may lie; -P does not.
    if not sys.flags.safe_path:
        del sys.path[0]
    from tokenmill.cli.main import main

    sys.exit(main())
