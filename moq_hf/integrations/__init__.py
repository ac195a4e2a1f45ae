"""Plugins for other programs, which load one of these modules by its name."""
