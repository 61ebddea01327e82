"""One file for each engine, run in an environment of its own: `python -m benchmarks.peers.adapters.NAME SETUP.json`."""
