"""One tier for many processes of a host: a server that has the index, and its clients."""
