"""Byte movers in processes of their own, over the same memory and files.

A thread that answers shares one interpreter with every thread that moves: between two strips it waits for a mover that
holds the interpreter and was itself put off by the kernel. So the service's bulk work, copies, checksums and device
requests, runs in forks of it that share nothing else with it:

    the service                     socket pairs, one packet each         a mover process
    MoverProcesses (``processes``)  -- control: maps, files, lanes -->    ``child``: one thread listens
    Lane.submit(function, ...)      -- a lane's jobs, first come first    ``child``: a lane's threads take one each
                                       served, whoever is free --------->
    a future                        <-- its answer ---------------------

A job is a function of a module and its arguments (``crossing``): shared memory and files cross as numbers, everything
else by value. A mover ends when the service does, whatever ended it; one that ends by itself ends the service.
"""

from kvstore.seams.movers.processes import Lane, MoverProcesses

__all__ = ["Lane", "MoverProcesses"]
