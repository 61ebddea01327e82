"""Architecture: what a checkpoint's config says of a model, as plain data."""
