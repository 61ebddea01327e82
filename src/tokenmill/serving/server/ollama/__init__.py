"""Ollama's API, for clients that speak no other: /api/chat and its siblings."""
