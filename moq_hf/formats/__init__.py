"""How a quantized weight lies in the files: one module for each form of delivery, all with the same names in it.

- `fits(spec)`: whether a layer can be stored so.
- `write(values, spec)`: its codes, scales and zero points as the tensors of the files.
- `read(stored)`: those tensors as codes, scales and zero points again.
- `FORMAT`: what compressed-tensors calls the form; None for floats.
- `WIDTH`: the bits that each code takes, where it does not take its own.

A packed checkpoint is an ordinary transformers folder in the format of
compressed-tensors, written with that library, so that a process which never heard of
moq_hf computes the same, bit for bit. `table` says which forms a folder may have, the
best one first; a layer takes the first that fits it. A new form is a module here and a
line in that table.
"""
