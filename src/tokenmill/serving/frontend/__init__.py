"""The path between HTTP and the engine: prompts to token ids, token ids to answers, and the API's engine client.

`TextProcessor` holds the whole logic of a text worker without sockets: `PromptProcessor` on the way in; detokenizer,
stop strings and `AnswerParser` on the way out. `worker` runs it as a process, `EngineClient` is the API's end. Nothing
here knows torch, the scheduler or HTTP.
"""
