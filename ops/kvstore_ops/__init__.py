"""Programs for operators: the console command, the benchmarks, the demo and the repository's own checks."""
