"""Methods of others that change the model itself, so that little is left to send at its cuts.

The library compresses the cuts of a model as it is. These are compared with it, each made here from
its published formulas: `subspace` (Subspace Networks) and `learned_basis` (MAPL). A rival is a
decoder in one process; what would cross a cut goes through `wire.crossing`, in the graph.
"""
