"""Copies that a device is told to do in order, and how they are told.

An interface, so that everything above it runs without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvatlas.geometry import Int64s

NO_STARTS = (np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
"""For runs that are told one by one: each span is one."""


class AddressRuns(NamedTuple):
    """Runs between two addresses, at every sum of a start and a span."""

    source: int
    target: int
    starts: tuple[Int64s, Int64s]
    """Offsets at the source and at the target; kept on the device as long as they are used."""
    spans: tuple[Int64s, Int64s, Int64s]
    """Offsets at either end, and lengths."""


class Posted(ABC):
    """Work that a queue was given."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the device has done it; raises where the device has failed."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it is done."""


class DeviceQueue(ABC):
    """A stream of its own on one device: what it is given is done in that order."""

    @abstractmethod
    def after(self, event: int) -> None:
        """What is posted from now on comes after what the event was last recorded behind."""

    @abstractmethod
    def post(self, runs: Sequence[AddressRuns]) -> Posted:
        """Copy; nobody waits."""
