"""Between HTTP and the engine: tokenizing, chat templates, incremental detokenizing, stop strings, the engine client.

`TextProcessor` holds the whole logic of a text worker without sockets; `worker` runs it as a process; `EngineClient`
is the API's end. Nothing here knows torch, the scheduler or HTTP.
"""
