"""kvatlas knows where every byte of an LLM's KV cache lives, and moves it anywhere."""

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Field, Layout, Page, Placement, validate

__version__ = "0.1.0"

__all__ = [
    "AtlasError",
    "Code",
    "DType",
    "Field",
    "Layout",
    "Page",
    "Placement",
    "__version__",
    "validate",
]
