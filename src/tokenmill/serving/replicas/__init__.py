"""The processes behind a server: their topology, their health, and the way of a request to one of them.

    launch_file, topology <- dispatcher (text workers), engine_handle <- engines <- supervisor (API process)

Every file may know the topology; none knows torch, HTTP or text. A replica is an engine beside others with the same
model.
"""
