"""Triton kernels for GPUs, each with the signature and the meaning of a torch reference. They also run interpreted."""
