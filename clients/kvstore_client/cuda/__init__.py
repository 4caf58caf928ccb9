"""Copies between the sidecar's memory and tensors of a GPU.

The sidecar's memory is registered with CUDA where a copy first needs it, a mapping at a time, so that the GPU's copy
engine reads and writes it by itself. Bytes cross the bus as they lie, in few long runs, into scratch memory on the GPU;
kernels there bring them into the order of the engine's tensors, or out of it. Two streams take turns: while one's bytes
cross, the other's are put in their places.
"""

from kvstore_client.cuda.lanes import common_gpu

__all__ = ["common_gpu"]
