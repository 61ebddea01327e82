"""The HTTP server: it starts and watches the other processes and speaks OpenAI's API.

`launch.run` is what the command line calls. Knows no torch and nothing of scheduling: it reaches the engine through
`frontend.client` only.
"""
