"""The user's model: its inventory, the layers to quantize, and how these get and lose their quantized classes."""
