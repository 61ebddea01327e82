"""Anthropic's route: messages."""
