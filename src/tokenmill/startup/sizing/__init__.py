"""Sizing: decide how many KV pages, windows and states fit into the memory of a machine."""
