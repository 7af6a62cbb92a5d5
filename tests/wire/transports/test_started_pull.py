"""Who waits for a pull that was begun: when it lets other threads run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas.wire.client import fast_path
from kvatlas.wire.client.fast_path import LaunchedPull
from kvatlas.wire.transports import cuda_copy
from kvatlas.wire.transports.cuda_copy import CopyPace, CudaCopy

BEGUN = 7.0


def test_who_waits_keeps_the_interpreter_only_while_its_copy_should_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, let_run = [BEGUN], list[float]()

    def is_over() -> bool:
        now[0] += 1e-5
        return now[0] > BEGUN + 9e-4

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(fast_path, "time", clock)
    monkeypatch.setattr(cuda_copy, "time", clock)
    monkeypatch.setattr(fast_path, "_let_others_run", lambda: let_run.append(now[0] - BEGUN))
    seen: Any = SimpleNamespace(confirmed=True, held=True)
    transfer: Any = SimpleNamespace(done=False)
    posted: Any = SimpleNamespace(done=is_over)
    pace = CopyPace(1.0, clock=clock.monotonic)
    for foreseen in (False, True):
        now[0] = BEGUN
        let_run.clear()
        if foreseen:
            pace.took(BEGUN, BEGUN + 5e-4, 1000)
        handle = CudaCopy.launched(posted, lambda: None, lambda: None, pace, 1000)
        read: Any = SimpleNamespace(handle=handle, seen=seen)
        assert LaunchedPull(read, read, read).is_soon_over(transfer)
        around_the_end = [late for late in let_run if 4.05e-4 < late < 5.95e-4]
        assert bool(around_the_end) is not foreseen
        assert min(let_run) < 1e-4
        assert max(let_run) > 8e-4, "what takes longer than it should lets others run again"
