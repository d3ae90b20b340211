"""Runs schedules: what each operation does, and executors for one thread or for lanes."""
