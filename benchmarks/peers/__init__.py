"""TokenMill and other engines, interleaved in one run on one machine: `python -m benchmarks.peers`."""
