"""One decoder for every family: an architecture is read from config.json as data, and one set of layers runs it."""
