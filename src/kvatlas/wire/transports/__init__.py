"""Transports: one interface to CUDA IPC, NIXL, Mooncake, TCP and shared memory.

`base` defines the interface and `registry` creates a transport by its name. This file imports
neither: the modules of `wire` that transports use import `base` themselves.
"""
