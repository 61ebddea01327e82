"""KV from elsewhere and to elsewhere: what a scheduler knows of it, the sources, and what copies pages in and out."""
