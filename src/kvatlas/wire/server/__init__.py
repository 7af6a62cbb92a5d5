"""The server end: a node, its offers, and the leases it grants."""
