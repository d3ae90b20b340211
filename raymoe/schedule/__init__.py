"""Schedules as data: one object is simulated, executed and drawn."""
