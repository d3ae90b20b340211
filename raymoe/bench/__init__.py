"""The benchmarks of `raymoe bench`: workloads, contenders, bounds, reports."""
