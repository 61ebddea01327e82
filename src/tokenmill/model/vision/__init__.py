"""Images: pixels, towers, positions, and the cache of what the encoder has made of them."""
