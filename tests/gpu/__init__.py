"""What must be right with tensors on a GPU. Where there is none, the same code runs on the CPU, which proves the
tests."""
