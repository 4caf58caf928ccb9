"""Memory of accelerators: allocated by one process, mapped by others, copied to and from host memory.

- ``memory``  what a device gives (``Device``, ``DeviceRegion``), and the host's memory in the place of a device
- ``driver``  the calls of the CUDA driver that are needed, by ctypes: neither the toolkit nor torch has to be installed
- ``cuda``    a CUDA device, and its memory mapped by another process

A region is exported as a descriptor (CUDA's virtual memory management exports one). So it is handed over as the arena's
regions are, and stays there until the last process that maps it has let go of it, whoever died before. A process that
maps a CUDA region may write it: the driver maps none read-only. A CUDA context begins at the first use of a device, in
the process that uses it. A fork of that process cannot use the context: byte movers are forked before any begins.
"""

from kvstore.seams.devices.memory import Device, DeviceMemory, DeviceRegion, HostDevice

__all__ = ["Device", "DeviceMemory", "DeviceRegion", "HostDevice"]
