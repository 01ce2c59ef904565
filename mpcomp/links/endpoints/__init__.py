"""What a link keeps of its method, and how that makes a message of a tensor."""
