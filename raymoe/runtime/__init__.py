"""Joins order, computation, memory and device."""
