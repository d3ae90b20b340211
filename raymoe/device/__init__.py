"""Devices, lanes and threads: the hardware of this machine as this process may use it."""
