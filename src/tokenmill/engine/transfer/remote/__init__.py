"""KV pages from another engine: their owners (leases), who may have them (a secret), and how they travel (transports).

    consumer                                   producer
    PageLink ── Ask(handle, prefix) ─────────> PageServer ── LeaseTable: pages held for the one that names the handle
             <── chunks of pages, CRC each ──              ── HostPages: where the pages lie

Everything here runs in threads of its own and knows no scheduler: the engine's thread collects the results between two
steps.
"""
