"""The private names of its libraries that moq_hf uses; each seam says what would break without them."""
