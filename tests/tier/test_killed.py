"""kill -9 at any moment of a store: after it every block is whole or absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRIALS = 400 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 12


def test_every_block_is_whole_or_absent_after_kill_9(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.tier.killed", str(tmp_path / "t"), str(TRIALS), "11"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60 + 5 * TRIALS,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    seen = [tuple(map(int, word.split("/"))) for word in run.stdout.split()]
    assert len(seen) == TRIALS
    # The trials mean something: keys were there, and were lost and stored anew meanwhile.
    assert min(names for names, *_ in seen) > 0
    assert len(set(seen)) > TRIALS // 4
