"""What every room uses and which uses none: tensors' descriptions, messages, steps, specs."""
