"""The version of moq_hf."""

__version__ = "0.3.0"
