"""Kernels of reuse and recompute on the engine's tensors: arrival, gather, deviation and selection, attention of
selected rows. Each has a plain torch path, which is the reference and the CPU's."""
