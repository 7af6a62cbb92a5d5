"""vLLM's own unit tests of remote prefill and decode, run against this connector.

They are read from a checkout of vLLM that the caller names, edited in a temporary copy (names
that changed by 0.32, a model that is here, this connector and its parameters) and run there:

    python -m tests.vllm.lifecycle /path/to/vllm
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.vllm.models import checkpoint

ROOT = Path(__file__).parents[2]
UNIT = Path("v1/kv_connector/unit")
TESTS = ("test_remote_decode_lifecycle.py", "test_remote_prefill_lifecycle.py")
MEMBER = "test_multi_connector.py"

_PARAMS = """
        from kvatlas.engines.vllm.orders import RemoteRequest, prompt_digest
        tokens = [1] * common_prefix_len
        tokens += [i * request_id for i in range(num_tokens - common_prefix_len)]
        told = RemoteRequest(
            version=1, request=f"prefill-{request_id}", tokens=num_tokens,
            endpoints=("tcp://my-host:1234",), prompt=prompt_digest(tokens, num_tokens),
        )
        kv_transfer_params |= told.params("my-engine-id")
"""
"""What a prefill engine with this connector answers beside what NixlConnector's does."""

EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "utils.py": (
        ('"facebook/opt-125m"', '"{model}"'),
        ("trust_remote_code=True,", "skip_tokenizer_init=True,"),
        ('kv_connector: str = "NixlConnector"', 'kv_connector: str = "KVAtlasConnector"'),
        (
            "kv_connector_module_path: str | None = None",
            'kv_connector_module_path: str | None = "kvatlas.engines.vllm"',
        ),
        ("            tp_size=1,\n        )\n", "            tp_size=1,\n        )" + _PARAMS),
    ),
    TESTS[1]: (("scheduler.skipped_waiting", "scheduler.kv_holding_waiting"),),
    MEMBER: (
        (
            "from vllm import LLM,",
            "from kvatlas.engines.vllm import KVAtlasConnector\nfrom vllm import LLM,",
        ),
        ('["MockHMAConnector"', '["KVAtlasConnector"'),
        (', "MockHMAConnector"]', ', "KVAtlasConnector"]'),
        (
            'kv_connector="MultiConnector",',
            'kv_connector="MultiConnector", kv_connector_module_path=None,',
        ),
    ),
}
"""What is replaced, file by file; each must be found."""

_OLD_STATISTICS = "TestMultiConnectorStats::test_"
LEFT_OUT = (
    # Loads a model from a hub.
    "test_multi_example_connector_consistency",
    # Statistics of NixlConnector, in a form that 0.32 does not have.
    f"{_OLD_STATISTICS}build_kv_connector_stats_reconstructs_nixl_stats",
    f"{_OLD_STATISTICS}build_kv_connector_stats_with_multiple_connectors",
    f"{_OLD_STATISTICS}build_kv_connector_stats_with_mixed_objects_and_dicts",
    f"{_OLD_STATISTICS}build_kv_connector_stats_handles_malformed_data",
    f"{_OLD_STATISTICS}reduce",
)
"""Tests of `test_multi_connector.py` in which no other connector has a part."""


def copy_edited(source: Path, target: Path, model: Path) -> None:
    """The tests under another root, with every edit made."""
    folder = target / "tests" / UNIT
    folder.mkdir(parents=True)
    for parent in (folder, *folder.parents):
        if parent == target:
            break
        (parent / "__init__.py").touch()
    for name in ("utils.py", *TESTS, MEMBER):
        text = (source / UNIT / name).read_text()
        for old, new in EDITS.get(name, ()):
            if old not in text:
                raise SystemExit(f"{name} is of a version that is not known: it lacks {old!r}")
            text = text.replace(old, new.replace("{model}", str(model)))
        (folder / name).write_text(text)


def main() -> int:
    """Run them, and say how many passed."""
    parser = argparse.ArgumentParser(prog="lifecycle", description=__doc__)
    parser.add_argument("vllm", type=Path, help="a checkout of vLLM, or its tests folder")
    given = parser.parse_args().vllm
    source = given if (given / UNIT).is_dir() else given / "tests"
    if not (source / UNIT).is_dir():
        raise SystemExit(f"{given} has no tests/{UNIT}: name a checkout of vLLM")
    with tempfile.TemporaryDirectory() as made:
        target = Path(made)
        copy_edited(source, target, checkpoint("llama", target))
        environment = os.environ | {
            "PYTHONPATH": f"{target}:{ROOT / 'src'}",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "--rootdir",
            made,
            "-p",
            "no:cacheprovider",
        ]
        command += [
            "-W",
            "ignore",
            *(f"--deselect=tests/{UNIT}/{MEMBER}::{name}" for name in LEFT_OUT),
        ]
        command += [f"tests/{UNIT}/{name}" for name in (*TESTS, MEMBER)]
        return subprocess.run(command, cwd=target, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
