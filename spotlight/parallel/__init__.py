"""Communicators and Ulysses sequence parallelism."""
