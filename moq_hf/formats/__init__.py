"""How files hold quantized weights.

A `Form` stores a single weight: its module writes it, reads it back and says which
weights fit. A `LayoutSpec` describes a whole folder: which forms it may contain, what
`config.json` says, and which versions load it. `table` lists all forms and layouts, the
best ones first; a layer takes the first form that fits it.

A packed checkpoint is an ordinary transformers folder in the format of
compressed-tensors, written with that library, so that a process without moq_hf computes
the same, bit for bit.

A new form needs a module here, and a word in a layout of the table. A new layout needs a
module here, with its own form if necessary, and a line in the table.
"""
