"""Assembly: load the parts of an engine, or of a rank, put them together and run its process."""
