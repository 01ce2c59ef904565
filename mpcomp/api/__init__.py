"""The object that a user holds: how a pipeline is built, runs a step, evaluates and generates."""
