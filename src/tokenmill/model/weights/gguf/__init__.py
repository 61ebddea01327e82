"""GGUF files (llama.cpp): their metadata as an ordinary model folder, and their tensors as weights."""
