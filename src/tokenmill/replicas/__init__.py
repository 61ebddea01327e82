"""The processes behind a server: which there are, how each is doing, and which engine gets a request.

    launch_file, topology <- router (text workers), engine_handle <- engines <- supervisor (API process)

Everybody may know the topology; no torch, no HTTP, no text. A replica is an engine beside others with the same model.
"""
