"""The routes of operators: health, metrics, pause, caches, and the state of requests and engines."""
