"""The KV cache as a bookkeeper sees it: page ids, the radix tree of prefixes, and who holds what.

Knows no torch, no sockets and no clock: the LRU clock is the step number.
"""
