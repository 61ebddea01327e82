"""Speculation: who proposes what a request may say next, and how much of it is worth a try. Changes no token, ever."""
