"""How many KV pages, windows and states fit into the memory that is there."""
