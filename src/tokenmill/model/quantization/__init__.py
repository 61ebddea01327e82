"""Weights with fewer bits, from a checkpoint to the kernels. One word each:

scheme          what a checkpoint says of all its weights: their layout, and the formats that keep their integers
layout          how one weight is stored in a checkpoint: in which tensors, and how they are read
quantized rows  what passes from a layout to the kernels: integers with scales; anything else passes as floats
packed format   how native kernels hold a weight in memory
"""
