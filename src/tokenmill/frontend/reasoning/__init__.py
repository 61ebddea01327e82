"""Thinking in a model's text, told apart from its answer."""
