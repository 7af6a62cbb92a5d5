"""Attacks on wires, kept as a suite: `make test-attack`, and `make soak` for an hour of faults."""
