"""KV pages from another engine: who has them (leases), who may have them (a secret), and how they travel (planes).

    consumer                                   producer
    PageLink ── Ask(handle, prefix) ─────────> PageServer ── LeaseTable: pages held for whoever names the handle
             <── chunks of pages, CRC each ──              ── HostPages: where the pages lie

Everything here runs in threads of its own and knows no scheduler: what it finds out is collected by the engine's
thread between two steps.
"""
