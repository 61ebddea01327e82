"""Several models behind one address: each a server of its own, started when a request names it."""
