"""What a machine can do: kernels, memory and links measured, and kept as a `HardwareSpec`."""
