"""One tensor over one cut: links, boundaries, tied weights, and who chooses their ratio."""
