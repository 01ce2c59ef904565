"""Ground floor, which every room uses: tensors' descriptions, messages, steps, specs."""
