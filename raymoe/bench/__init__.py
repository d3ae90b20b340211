"""What `raymoe bench` runs: workloads, contenders, bounds, reports."""
