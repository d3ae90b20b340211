"""Examine a machine: versions, limits, rates; kernels and schedules against references."""
