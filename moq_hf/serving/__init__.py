"""Who can serve a model: rules read in the servers' own sources, asked before training and of a folder."""
