"""Routing: which of several engines gets a request, by what each has cached and what it has to do.

    policies <- router (text workers) -> books, prefix_index        reporter (engines)

Pure bookkeeping: no clock, no sockets, no torch. A choice follows from the requests, reports and ends that came before.
"""
