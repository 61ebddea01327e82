"""Bookkeeping of the KV cache: page ids, the radix tree of prefixes, and the pages that each request holds.

Knows no torch, no sockets and no clock: the LRU clock is the step number.
"""
