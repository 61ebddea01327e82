"""Transfer of KV pages from and to other places: the scheduler's side, the sources, and the copying of pages."""
