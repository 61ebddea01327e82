"""The one door from the command line to the in-process engine; everything heavy is imported behind it."""

from __future__ import annotations
