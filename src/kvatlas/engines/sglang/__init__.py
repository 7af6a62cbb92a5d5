"""Description of SGLang's memory: device pools, host pools, and the objects of HiCache.

The functions read SGLang's own objects, and do not import SGLang. Versions that were not compared
with kvatlas are refused.
"""

from kvatlas.engines.sglang.device_pools import KNOWN, describe_pool
from kvatlas.engines.sglang.host_pools import describe_host_pool
from kvatlas.engines.sglang.page_files import (
    PageFiles,
    PageNamespace,
    page_buffer,
    page_hashes,
    rank_suffix,
)

__all__ = [
    "KNOWN",
    "PageFiles",
    "PageNamespace",
    "describe_host_pool",
    "describe_pool",
    "page_buffer",
    "page_hashes",
    "rank_suffix",
]
