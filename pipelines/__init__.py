"""The notebook runner, the notebook cleaner, the results index and the benchmarks."""
