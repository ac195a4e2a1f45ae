"""Packed checkpoints for other runtimes: a file per target, and what they share."""
