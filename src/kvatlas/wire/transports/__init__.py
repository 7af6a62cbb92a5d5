"""Transports: one interface to CUDA IPC, NIXL, Mooncake, TCP and shared memory.

`base` defines the interface and `registry` creates a transport by its name. This file imports
neither, to avoid import cycles: transports use modules of `wire` that import `base`.
"""
