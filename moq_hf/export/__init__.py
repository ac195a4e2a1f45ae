"""Packed checkpoints for other runtimes: a module per target, and what they share."""
