"""Kinds of attention, each a class that answers `kind.AttentionKind`."""
