"""Adapters (LoRA, Hu et al. 2021): reading, keeping and packing what is added to the matrices of a model."""
