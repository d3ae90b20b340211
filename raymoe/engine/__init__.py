"""Which requests: rows become sequences, sequences share passes, passes become generations."""
