"""Attention over a paged KV cache: the protocol, the pool of pages, and its backends."""
