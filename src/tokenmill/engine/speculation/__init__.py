"""Speculation: propose what a request may say next, and choose how much of it is worth a try. Changes no token."""
