"""`raymoe bench --suite gpu`: schedules and engines on one GPU, each part in its own process."""
