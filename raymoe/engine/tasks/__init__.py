"""Tasks besides generation: score, classify and embed."""
