"""The routes of whoever runs the server: health, metrics, pause, caches, what is going on."""
