"""What is computed: a decoder of generic blocks, put together from a `ModelSpec`."""
