"""`LLM`: the engine in this process for scripts, with its outputs and sessions."""
