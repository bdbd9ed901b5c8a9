"""Machines: where they come from, what they cost, how they end."""
