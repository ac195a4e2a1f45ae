"""The user's model: what is in it, which layers are quantized, how they get and lose their classes."""
