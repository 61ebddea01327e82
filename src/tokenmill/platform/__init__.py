"""What the machine offers: memory, threads, devices. The only package that may say `torch.cuda`."""
