"""The machine and PyTorch as they are found: compiled functions, threads, memory, internals."""
