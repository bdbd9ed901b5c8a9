"""Bytes that outlive a process: objects, checkpoints, weights, artifacts."""
