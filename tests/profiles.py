"""Which profile tests run in: quick, or deep with `HYPOTHESIS_PROFILE=deep` (`make test-deep`)."""

import os

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
"""Every case and many examples, rather than some by turns."""
