"""What generated chat text consists of: reasoning, answer and tool calls."""
