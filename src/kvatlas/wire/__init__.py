"""Move KV caches between processes and hosts, along routes and over transports.

A `Node` serves one rank's caches, a `Session` connects a node to its peers, and a `Transfer` tracks
one request while it moves.
"""

from kvatlas.wire.block_staging import BlockStaging
from kvatlas.wire.channels import Channels
from kvatlas.wire.checksum import crc32, has_fast_crc32
from kvatlas.wire.client import Session, Transfer
from kvatlas.wire.client.transfer_request import How
from kvatlas.wire.connection import Connection
from kvatlas.wire.gpu_offload import GpuOffload, HostPins
from kvatlas.wire.memory_copy import (
    as_bytes,
    copy_pools,
    copy_runs,
    copy_runs_unchecked,
    device_of,
    gpu_pools,
    is_on_gpu,
    memory_of,
    one_length,
    rank_pools,
)
from kvatlas.wire.metrics import Metrics
from kvatlas.wire.nested_copy import copy_grids, copy_nested, copy_nested_unchecked, move_pools
from kvatlas.wire.peers import check_plan_size
from kvatlas.wire.protocol import (
    BlockTables,
    Key,
    Message,
    Ok,
    Refusal,
    SendPlan,
    bad_handshake,
    by_group,
    decode,
    encode,
    new_key,
    pack_tables,
    unpack_tables,
)
from kvatlas.wire.refusals import raise_refusal
from kvatlas.wire.rpc import Caller, Server
from kvatlas.wire.run_bounds import Bytes, Places
from kvatlas.wire.sample_server import (
    SAMPLE_IDENTITY,
    SampleTask,
    converting,
    random_bytes,
    run_sample_server,
)
from kvatlas.wire.security import Security, TlsContexts
from kvatlas.wire.server import Node, pools_for
from kvatlas.wire.shared_pools import SharedPools, map_pools
from kvatlas.wire.staging import stream_bytes
from kvatlas.wire.stream_copy import convert_parts, copy_request
from kvatlas.wire.transports import (
    HOST,
    TRANSPORT_NAMES,
    Handle,
    Link,
    Memory,
    Transport,
    make_transport,
)
from kvatlas.wire.transports.bounds import check_bounds, check_grid_bounds
from kvatlas.wire.transports.cuda_driver import load_driver
from kvatlas.wire.transports.device_marks import DeviceMarks
from kvatlas.wire.transports.errors import peer_lost
from kvatlas.wire.transports.file import copy_file_runs
from kvatlas.wire.unix_sockets import connect_to_path, forget_path, unix_endpoint

__all__ = [
    "HOST",
    "SAMPLE_IDENTITY",
    "TRANSPORT_NAMES",
    "BlockStaging",
    "BlockTables",
    "Bytes",
    "Caller",
    "Channels",
    "Connection",
    "DeviceMarks",
    "GpuOffload",
    "Handle",
    "HostPins",
    "How",
    "Key",
    "Link",
    "Memory",
    "Message",
    "Metrics",
    "Node",
    "Ok",
    "Places",
    "Refusal",
    "SampleTask",
    "Security",
    "SendPlan",
    "Server",
    "Session",
    "SharedPools",
    "TlsContexts",
    "Transfer",
    "Transport",
    "as_bytes",
    "bad_handshake",
    "by_group",
    "check_bounds",
    "check_grid_bounds",
    "check_plan_size",
    "connect_to_path",
    "convert_parts",
    "converting",
    "copy_file_runs",
    "copy_grids",
    "copy_nested",
    "copy_nested_unchecked",
    "copy_pools",
    "copy_request",
    "copy_runs",
    "copy_runs_unchecked",
    "crc32",
    "decode",
    "device_of",
    "encode",
    "forget_path",
    "gpu_pools",
    "has_fast_crc32",
    "is_on_gpu",
    "load_driver",
    "make_transport",
    "map_pools",
    "memory_of",
    "move_pools",
    "new_key",
    "one_length",
    "pack_tables",
    "peer_lost",
    "pools_for",
    "raise_refusal",
    "random_bytes",
    "rank_pools",
    "run_sample_server",
    "stream_bytes",
    "unix_endpoint",
    "unpack_tables",
]
