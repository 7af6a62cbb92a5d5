"""Routes: from any plan to any plan of the same model, as byte ranges."""

from kvatlas.route.bind import Copy
from kvatlas.route.match import Reason, fingerprint, reasons
from kvatlas.route.route import Bound, Route, route

__all__ = ["Bound", "Copy", "Reason", "Route", "fingerprint", "reasons", "route"]
