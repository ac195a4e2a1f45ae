"""Packed checkpoints: layout, saving, verifying, the proof and the card."""
