"""Attention over a paged KV cache: the protocol, one registry of backends, the layouts of the cache, and the backends.

A backend is a row of `registry.py` and a file of `backends/`.
"""
