"""A pilot: methods tried at the cuts of a user's own pipeline, and all of it undone."""
