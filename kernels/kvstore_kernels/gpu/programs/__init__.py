"""Programs for a GPU, in Triton. Importing one of them needs Triton; the launchers of the room above are what others
import. The parameters in capitals are constants of a compilation.

Offsets into pages and planes are 64-bit: an engine's cache has more than 2**31 elements.
"""
