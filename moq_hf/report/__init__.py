"""A finished run as a page."""
