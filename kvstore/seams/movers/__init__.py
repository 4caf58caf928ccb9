"""Byte movers in processes of their own, over the same memory and files.

As threads, movers would share one interpreter with the thread that answers: it would wait for a mover that holds the
interpreter while the kernel has descheduled that mover. So the service's bulk work (copies, checksums and device
requests) runs in forks that share only memory and files with it:

    the service                     socket pairs, one packet each         a mover process
    MoverProcesses (``processes``)  -- control: maps, files, lanes -->    ``child``: one thread listens
    Lane.submit(function, ...)      -- a lane's jobs, first come first    ``child``: a lane's threads take one each
                                       served, by any free thread ------>
    a future                        <-- its answer ---------------------

A job is a function of a module and its arguments (``crossing``): shared memory and files cross as numbers, everything
else by value. A mover ends when the service ends, for any reason; a mover that ends by itself ends the service.
"""

from kvstore.seams.movers.processes import Lane, MoverProcesses

__all__ = ["Lane", "MoverProcesses"]
