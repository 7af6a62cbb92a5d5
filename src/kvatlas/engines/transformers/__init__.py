"""Integration with transformers: `AtlasCache` and `attn_implementation="kvatlas"`.

Importing this package registers the attention implementation. The package requires transformers
5.17 or later (`pip install 'kvatlas[transformers]'`).
"""

from kvatlas.engines.transformers.cache import AtlasCache
from kvatlas.engines.transformers.decode_graph import DecodeGraph
from kvatlas.engines.transformers.identity_of_model import model_identity
from kvatlas.engines.transformers.paged_attention import register
from kvatlas.engines.transformers.plan_for_model import make_plan
from kvatlas.engines.transformers.prefix_reuse import PrefixReuse
from kvatlas.engines.transformers.supported_versions import warn_of_untried_version

warn_of_untried_version()
register()

__all__ = ["AtlasCache", "DecodeGraph", "PrefixReuse", "make_plan", "model_identity"]
