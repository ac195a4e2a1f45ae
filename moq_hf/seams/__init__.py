"""What moq_hf uses of the private surface of its libraries: each seam says what would break."""
