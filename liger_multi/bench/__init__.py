"""Time, memory and error of every operator beside plain PyTorch, on the machine at hand."""
