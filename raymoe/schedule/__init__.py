"""In which order: schedules as data, simulated, executed and drawn from the same object."""
