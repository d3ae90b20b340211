"""The engine: requests become sequences, which share steps until their generations are done."""
