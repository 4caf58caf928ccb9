"""The programs that an operator runs: the console command, the benchmarks, the demo and the repository's own checks."""
