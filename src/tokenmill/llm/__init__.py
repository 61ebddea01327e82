"""`LLM`: the engine in this process, for scripts: prompts in, outputs out; sessions; what they give back."""
