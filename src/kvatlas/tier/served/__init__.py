"""A tier shared by many processes of a host: a server that owns the index, and its clients."""
