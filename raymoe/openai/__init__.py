"""OpenAI's batch API: its files, and a server that takes them."""
