"""The processes behind a server: which there are, how each is doing, and the way of a request to one of them.

    launch_file, topology <- dispatcher (text workers), engine_handle <- engines <- supervisor (API process)

Everybody may know the topology; no torch, no HTTP, no text. A replica is an engine beside others with the same model.
"""
