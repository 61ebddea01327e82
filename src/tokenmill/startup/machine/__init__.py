"""Inspect this machine, and what a model would need of it: devices, memory, bandwidth, and models on its disk."""
