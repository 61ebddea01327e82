"""Offline throughput; the same as `tokenmill bench throughput`. The last line of stdout is one JSON document.

python benchmarks/throughput.py --model folder --num-prompts 64 --input-len 100:1024 --output-len 100:1024
"""

from __future__ import annotations

import sys

from tokenmill.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "throughput", *sys.argv[1:]]))
