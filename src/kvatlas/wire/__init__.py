"""Wires: bytes moved along routes, by transports that people run."""
