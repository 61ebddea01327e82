"""The API process: it starts and watches the other processes and speaks OpenAI's, Anthropic's and SGLang's APIs.

`process.launch.run` is what the command line calls. A body becomes a call (`generation.call`), a call a message to a
text worker, and what the worker says a reply in the API's form. Knows no torch, no scheduling, no parsing of text.
"""
