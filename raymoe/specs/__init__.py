"""Models, weights, hardware and workloads as plain data."""
