"""``make gpu``: everything that only a machine with a GPU can prove or measure, in one command that ends in time.

``python -m kvstore_ops.gpu`` names the hardware, runs the tests that need a GPU and the benchmarks of ``bench.GPU``,
each in a process of its own, and writes one JSON file and one table. All of it has a total budget. Each part has a
share of what is left of it, and is cut at its share: the table says so. A part that fails does not stop the others.
Without a GPU the command says what is missing, and what that leaves untested.

- ``hardware``  what this machine has, and what it lacks
- ``parts``     the tests and benchmarks, and their shares
- ``process``   one part in its process: its end, in time or not
- ``report``    the JSON file and the table
"""
