"""Ask a test's server for responses with OpenAI's own client."""


def create(responses, **fields):
    """Return the response to a short greeting, or to what `fields` ask instead."""
    return responses.create(**{"model": "echo", "input": "hello there", "max_output_tokens": 12} | fields)
