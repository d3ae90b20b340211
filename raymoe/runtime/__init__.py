"""Runs schedules: what each operation does, and executors for one thread or the lanes of a device."""
