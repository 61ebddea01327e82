"""Memory, threads and devices of the machine. The only package that may say `torch.cuda`."""
