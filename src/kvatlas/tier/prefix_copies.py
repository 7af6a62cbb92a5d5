"""`PrefixCopies`: copies of prefixes to other stores. Closing the tier cancels them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.tier.store_calls import Deadline
from kvatlas.tier.store_inspection import CopiedPrefix, copy_prefix
from kvatlas.tier.stores import ObjectStore


class PrefixCopies:
    """The prefix copies that a tier has in flight, each in the thread of its caller."""

    def __init__(self) -> None:
        self._under_way, self._closing = 0, False
        self._changed = threading.Condition()

    def copy(
        self,
        store: ObjectStore,
        to: ObjectStore,
        tokens: Sequence[int],
        *,
        cancelled: Callable[[], bool] | None = None,
        **about: Any,
    ) -> CopiedPrefix:
        """Copy a prefix with `copy_prefix`. The copy is also cancelled by `close`."""
        with self._changed:
            if self._closing:
                problem, hint = "The tier is closed", "Open the tier again"
                got = "a call after close()"
                raise AtlasError(Code.UNREADABLE, problem, got=got, hint=hint)
            self._under_way += 1

        def ended() -> bool:
            return self._closing or (cancelled is not None and cancelled())

        try:
            return copy_prefix(store, to, tokens, cancelled=ended, **about)
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def close(self, deadline: Deadline) -> bool:
        """Cancel all copies and return whether they have ended before the deadline."""
        with self._changed:
            self._closing = True
            return self._changed.wait_for(lambda: not self._under_way, deadline.left)
