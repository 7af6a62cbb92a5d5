"""The formats that users and peers depend on, as data that a test compares with a recording.

    python -m tests.golden.formats > tests/golden/recorded.json

records them anew. A changed line there is a change of a format: it needs a new version of the
format, or an entry in the changelog.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from msgspec import inspect
from typer.main import get_command

from kvatlas.cli import bench
from kvatlas.cli.commands import app
from kvatlas.errors import Code
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan, plan
from kvatlas.pool import BlockStored, EventPublisher
from kvatlas.tier import FolderStore, HostStore, StoreTier, prefix_keys
from kvatlas.tier import format as tier_format
from kvatlas.tier.blocks import TierBlock
from kvatlas.tier.request_blocks import Cover
from kvatlas.tier.served import messages as served
from kvatlas.wire import encoding, protocol
from tests.cli.helpers import kvatlas

RECORDED = Path(__file__).parent / "recorded.json"
TRACE = str(Path(__file__).parents[1] / "pool" / "sample_trace.jsonl")
IDENTITY = CacheIdentity(weights="w", tenant="t")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def error_codes() -> list[str]:
    return sorted(Code)


PLANS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {"memory": "8GiB"},
    "gpt-oss-20b": {"memory": "8GiB", "tp": 2, "layout": "BHLNC", "policy": "vllm"},
    "Qwen3.5-397B-A17B": {"memory": "20GiB", "tp": 2, "pp": 2, "kv_dtype": "fp8"},
}


def plans() -> dict[str, dict[str, Any]]:
    """Keys of three plans as JSON, and a digest of all but their prose.

    One is dense, one has windows, one is a hybrid of two stages.
    """
    found = {}
    for model, options in PLANS.items():
        fields = json.loads(plan(model, **options).to_json())
        keys = sorted(key_paths(fields))
        for prose in ("reasons", "warnings"):
            del fields[prose]
        found[model] = {"keys": keys, "digest": digest(json.dumps(fields).encode())}
    return found


def tier_plan() -> Plan:
    return plan("Qwen3-8B", memory="32MiB", layout="BHLNC", block_size=16, max_len=64)


def filled(store: Any) -> None:
    """Store one block of 16 tokens in a tier on `store`."""
    rows = tier_plan()
    pools = {0: np.arange(rows.pools[0].nbytes, dtype=np.uint32).astype(np.uint8)}
    with StoreTier(store, rows, IDENTITY, staging=16 << 20) as tier:
        keys = prefix_keys(rows, list(range(100, 116)))
        tier.store(pools, rows, blocks=[3], tokens=16, keys=keys)


def tier_file() -> dict[str, str]:
    """The header and one record of a tier's file, whose plan is replaced by a few bytes."""
    made, text, identity = tier_plan(), b"a plan", bytes(range(16))
    extent = tier_format.Extent(made, len(text))
    block = TierBlock(
        0, 3, 0, b"key", Cover(0, 16), whole=True, verified=True, checksum=7, sequence=9
    )  # fmt: skip
    header = tier_format.header(text, identity, extent)
    record = tier_format.RecordFormat(made, extent, identity).write(block)
    return {"header": header[:128].hex(), "first_page": digest(header), "record": record.hex()}


def tier_objects() -> dict[str, str]:
    """The names of all objects that one block becomes in a store, and their contents.

    Marks contain the plan with its prose, so only their names count.
    """
    store = HostStore()
    filled(store)
    found = {}
    for name in sorted(store.names()):
        stored = np.zeros(store.size(name), np.uint8)
        store.get([(name, [stored])])
        found[name] = "" if "/marks/" in name else digest(stored.tobytes())
    return found


def messages() -> dict[str, list[str]]:
    """Each kind of message: its fields, and digests of it with all fields and with few."""
    kinds = {kind for union in (protocol.Question, protocol.Answer) for kind in get_args(union)}
    kinds |= {
        kind for union in (served.TierQuestion, served.TierAnswer) for kind in get_args(union)
    }
    found = {}
    for kind in kinds:
        about = inspect.type_info(kind)
        assert isinstance(about, inspect.StructType)
        encoded = [digest(encoding.encode(sample(about, every=every))) for every in (True, False)]
        found[str(about.tag)] = [" ".join(field.encode_name for field in about.fields), *encoded]
    return found


def sample(kind: inspect.Type, *, every: bool) -> Any:
    """A value of a type; structs with all their fields, or only with those that they require."""
    match kind:
        case inspect.StructType():
            fields = [field for field in kind.fields if every or field.required]
            return kind.cls(**{field.name: sample(field.type, every=every) for field in fields})
        case inspect.UnionType():
            first = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
            return sample(first, every=every)
        case inspect.DictType():
            return {sample(kind.key_type, every=every): sample(kind.value_type, every=every)}
        case inspect.VarTupleType() | inspect.ListType():
            return (sample(kind.item_type, every=every),)
        case inspect.TupleType():
            return tuple(sample(one, every=every) for one in kind.item_types)
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.IntType():
            return max(kind.ge or 0, 5)
        case inspect.FloatType():
            return 1.5
        case inspect.BoolType():
            return True
        case inspect.BytesType():
            return bytes(range(1, 1 + (kind.min_length or 4)))
        case inspect.StrType():
            return "s" * (kind.min_length or 4)
    raise TypeError(kind)


def key_paths(value: Any, path: str = "") -> set[str]:
    """Paths to all values of a JSON document; `[]` stands for any item of a list."""
    if isinstance(value, dict):
        begin = f"{path}." if path else ""
        return {one for key, item in value.items() for one in key_paths(item, f"{begin}{key}")}
    if isinstance(value, list):
        return {one for item in value for one in key_paths(item, f"{path}[]")} or {f"{path}[]"}
    return {path}


def commands_with_json() -> list[str]:
    """All commands that have the option --json."""

    def walk(command: Any, name: str) -> Iterator[str]:
        for part, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{name} {part}".strip())
        if any("--json" in option.opts for option in command.params):
            yield name

    return sorted(walk(get_command(app), ""))


def json_keys(folder: Path) -> dict[str, list[str]]:
    """Paths in the JSON of each command, by its name; `(...)` tells two uses of one apart."""
    plan_file, archive, events = folder / "plan.json", folder / "all.tar", f"ipc://{folder}/events"
    plan_file.write_bytes(plan("Qwen3-8B", memory="8GiB").to_json())
    filled(FolderStore(folder / "store"))
    store, copy = f"folder://{folder}/store", f"folder://{folder}/copy"
    other, prefix = f"folder://{folder}/other", folder / "prefix.json"
    prefix.write_text("[1, 2, 3]")
    simulated = ["Llama-3.1-8B", "--memory", "2GiB", "--max-len", "8K", "--trace", TRACE]
    hybrid = ["Qwen3.5-397B-A17B", "--memory", "20GiB"]
    ends = ["--from", "tp=2", "--to", "layout=BHLNC", "--tokens", "48"]
    found = {
        "plan": said("plan", *hybrid),
        "plan (--gpu)": said("plan", "Qwen3-8B", "--gpu", "H100"),
        "plan (--compare)": said("plan", *hybrid, "--compare", "pack=1,4"),
        "plan (--trace)": said("plan", *simulated, "--block-size", "16"),
        "fit": said("fit", "Qwen3-8B", "--gpu", "8xH100"),
        "budget": said("budget", "Qwen3-8B", "--gpu", "8xH100", "--max-len", "8K"),
        "explain": said("explain", *hybrid),
        "explain (--compare)": said("explain", *hybrid, "--compare", "policy=vllm@0.32,vllm@0.33"),
        "check": said("check", "Qwen3-8B", *ends),
        "doctor": said("doctor", str(plan_file), str(plan_file)),
        "move": said("move", "Qwen3-8B", *ends, "--transport", "shm"),
        "bench": bench_over_shm(),
        "simulate": said("simulate", *simulated),
        "trace": said("trace", TRACE),
        "simulate (--compare)": said("simulate", *simulated, "--compare", "memory=1GiB,2GiB"),
        "events": recorded_events(events, folder / "some.events"),
        "models": said("models"),
        "models (NAME)": said("models", "Qwen3-8B"),
        "layouts": said("layouts"),
        "releases": said("releases", "0.32", "0.33"),
        "tier ls": said("tier", "ls", store),
        "tier stat": said("tier", "stat", store),
        "tier verify": said("tier", "verify", store),
        "tier gc": said("tier", "gc", store),
        "tier export": said("tier", "export", store, str(archive)),
        "tier import": said("tier", "import", copy, str(archive)),
        "tier copy": said("tier", "copy", store, "--prefix", str(prefix), "--to", other),
    }
    return {name: sorted(key_paths(value)) for name, value in found.items()}


def said(*words: str) -> Any:
    """The JSON that a command prints."""
    result = kvatlas(*words, "--json")
    assert result.exit_code == 0, (words, result.output)
    return json.loads(result.stdout)


def bench_over_shm() -> Any:
    """`bench wire`, over the one transport that runs on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "TRANSPORTS", ("shm",))
        return said("bench", "wire")


def recorded_events(endpoint: str, path: Path) -> Any:
    """`events`, of a publisher that runs meanwhile."""
    with EventPublisher(endpoint) as publisher:
        batch = [BlockStored([1], None, list(range(16)), 16)]
        with repeatedly(lambda: publisher(batch)):
            return said("events", endpoint, "-o", str(path), "--batches", "2")


@contextmanager
def repeatedly(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` every few milliseconds, in another thread."""
    ended = Event()

    def run() -> None:
        while not ended.wait(0.02):
            act()

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def formats(folder: Path) -> dict[str, Any]:
    return {
        "error_codes": error_codes(),
        "plans": plans(),
        "tier_file": tier_file(),
        "tier_objects": tier_objects(),
        "messages": messages(),
        "json_keys": json_keys(folder),
    }


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        text = msgspec.json.encode(formats(Path(folder)), order="sorted")
    sys.stdout.write(msgspec.json.format(text, indent=1).decode() + "\n")
