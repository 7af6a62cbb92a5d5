"""Wires: bytes moved along routes, by transports that people run.

A `Node` puts one rank's caches on the wire, a `Session` connects it to its peers, and a
`Transfer` is one request on its way.
"""

from kvatlas.wire.checksum import crc32
from kvatlas.wire.client import Session, Transfer
from kvatlas.wire.client.rank_lease import How
from kvatlas.wire.gpu_offload import GpuOffload, HostPins
from kvatlas.wire.memory_copy import (
    Bytes,
    Places,
    as_bytes,
    copy_pools,
    copy_runs,
    device_of,
    gpu_pools,
    is_on_gpu,
    memory_of,
    one_length,
    rank_pools,
)
from kvatlas.wire.metrics import Metrics
from kvatlas.wire.peers import check_plan_size
from kvatlas.wire.sample_server import SampleTask, random_bytes, run_sample_server
from kvatlas.wire.security import TlsContexts
from kvatlas.wire.server import Node, pools_for
from kvatlas.wire.staging import stream_bytes
from kvatlas.wire.stream_copy import copy_request
from kvatlas.wire.transports import (
    HOST,
    TRANSPORT_NAMES,
    Handle,
    Link,
    Memory,
    Transport,
    make_transport,
)
from kvatlas.wire.transports.base import check_bounds
from kvatlas.wire.transports.file import copy_file_runs

__all__ = [
    "HOST",
    "TRANSPORT_NAMES",
    "Bytes",
    "GpuOffload",
    "Handle",
    "HostPins",
    "How",
    "Link",
    "Memory",
    "Metrics",
    "Node",
    "Places",
    "SampleTask",
    "Session",
    "TlsContexts",
    "Transfer",
    "Transport",
    "as_bytes",
    "check_bounds",
    "check_plan_size",
    "copy_file_runs",
    "copy_pools",
    "copy_request",
    "copy_runs",
    "crc32",
    "device_of",
    "gpu_pools",
    "is_on_gpu",
    "make_transport",
    "memory_of",
    "one_length",
    "pools_for",
    "random_bytes",
    "rank_pools",
    "run_sample_server",
    "stream_bytes",
]
