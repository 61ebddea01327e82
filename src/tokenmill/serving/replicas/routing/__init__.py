"""Routing: choose the engine of a request by each engine's cache and load.

    policies <- router (text workers) -> engine_load, prefix_index        reporter (engines)

Pure bookkeeping: no clock, no sockets, no torch. A choice follows from earlier requests, reports and ends alone.
"""
