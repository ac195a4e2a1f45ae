"""How quantized weights lie in the files.

A `Form` is how one weight lies there: a module writes it, reads it again and says what
fits. A `LayoutSpec` is how the weights of a folder lie together: which forms may stand in
it, what `config.json` says, which versions load it. `table` has all of both, the best
ones first; a layer takes the first form that fits it.

A packed checkpoint is an ordinary transformers folder in the format of
compressed-tensors, written with that library, so that a process which never heard of
moq_hf computes the same, bit for bit.

A new form is a module here, and a word in a layout of the table. A new layout is a module
here, with a form of its own if it needs one, and a line in the table.
"""
