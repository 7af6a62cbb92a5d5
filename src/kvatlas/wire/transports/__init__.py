"""Transports: one interface over CUDA IPC, NIXL, Mooncake, shared memory, files, plain memory.

`base` defines the interface and `registry` creates a transport by its name. This file imports
neither: the modules of `wire` that transports use import `base` themselves.
"""
