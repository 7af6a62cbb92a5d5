"""`kvatlas tier serve`: a process that serves a tier until it is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from kvatlas.planning import plan
from kvatlas.tier import Tier, TierClient
from kvatlas.tier.file_owner import socket_beside

ROOT = Path(__file__).parents[2]


def test_a_tier_is_served_until_its_process_is_told_to_end(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.tier"
    run = [sys.executable, "-m", "kvatlas", "tier", "serve", str(path)]
    about = ["--model", "Qwen3-8B", "--memory", "32MiB", "--max-len", "64"]
    serving = subprocess.Popen(
        run + about,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "COLUMNS": "400"},
    )
    try:
        assert serving.stdout is not None
        assert "Serving Qwen3-8B" in serving.stdout.readline()
        with TierClient(socket_beside(path)) as client:
            assert client.match([b"first 64 tokens"], 64) == 0
            made = plan(
                "Qwen3-8B", memory="32MiB", layout="BLHNC", block_size=64, max_len=64, in_flight=0
            )
            assert client.plan == made
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(30) == 0
            assert client.match([b"first 64 tokens"], 64) == 0, "gone is a miss"
    finally:
        serving.kill()
        serving.wait()
    assert not socket_beside(path).exists()
    Tier.open(path).close()
