"""Description of LMCache's chunks, and of the files in which it stores them.

The functions read LMCache's own objects, and do not import LMCache.
"""

from kvatlas.engines.lmcache.chunk_files import ChunkFiles, ChunkKey
from kvatlas.engines.lmcache.chunks import FORMATS, KNOWN, chunk_buffer, describe_chunks

__all__ = ["FORMATS", "KNOWN", "ChunkFiles", "ChunkKey", "chunk_buffer", "describe_chunks"]
