"""Pictures of the documents, as SVG: written by `tools/draw.py`, from real step logs where they show numbers."""
