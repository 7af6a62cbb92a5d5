"""Writes the corpus of bad handshakes: a good one, and everything that can be wrong with it."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from kvatlas.planning import Plan
from kvatlas.routing import fingerprint
from kvatlas.wire.protocol import MAX_MESSAGE_BYTES, OLDEST_VERSION, VERSION
from tests.identities import OURS
from tests.wire.corpus import HERE
from tests.wire.helpers import small
from tests.wire.raw import framed

Json = dict[str, Any]
Change = Callable[[Json], object]


def plan_json(made: Plan) -> Json:
    plan: Json = json.loads(made.to_json())
    return plan


def hello(made: Plan | None = None, plan: bytes | None = None, **changed: Any) -> Json:
    """A good hello, but for what is changed."""
    made = made or small("dense", tp=2)
    text = made.without_notes().to_json() if plan is None else plan
    said: Json = {
        "type": "hello",
        "version": VERSION,
        "oldest": OLDEST_VERSION,
        "name": "stranger",
        "incarnation": bytes(16),
        "fingerprint": fingerprint(made),
        "plan_hash": hashlib.sha256(text).digest(),
        "plan": text,
        "rank": 0,
        "memory": [registered(pool.index, 1 << 30, pool.nbytes) for pool in made.pools],
        "transport": "local",
        "metadata": b"",
        "identity": {"weights": OURS.weights},
    }
    return said | changed


def registered(index: int, address: int, nbytes: int, device: int = 0) -> Json:
    return {"index": index, "address": address, "nbytes": nbytes, "device": device}


def terms(*scales: list[float]) -> Json:
    """What a peer would convert, with scales of so many layers."""
    by_layer = {f"layers.{place}.attn": pair for place, pair in enumerate(scales)}
    return {"convert": "fp8->bf16", "scales": by_layer}


def sealed(said: Any) -> bytes:
    return framed(msgspec.msgpack.encode(said))


def with_plan(change: Change, **changed: Any) -> bytes:
    """A hello whose plan is changed and whose hash is right."""
    made = plan_json(small("dense", tp=2))
    change(made)
    return sealed(hello(plan=json.dumps(made).encode(), **changed))


def without(key: str) -> Json:
    return {name: value for name, value in hello().items() if name != key}


def put(*path: Any) -> Change:
    """Set one value deep inside a plan: the last of the path."""

    def change(made: Json) -> None:
        *way, last, value = path
        inner: Any = made
        for key in way:
            inner = inner[key]
        inner[last] = value

    return change


def cases() -> dict[str, tuple[str, bytes]]:
    """Every case: how it is answered, and its bytes."""
    good = sealed(hello())
    return framing(good) | fields() | numbers() | regions() | plans() | bombs() | announcements()


def framing(good: bytes) -> dict[str, tuple[str, bytes]]:
    payload = good[4:]
    bad = "bad_handshake"
    return {
        "good": ("welcome", good),
        "empty_frame": (bad, bytes(4)),
        "length_cut": ("nothing", good[:2]),
        "length_alone": ("nothing", good[:4]),
        "shorter_than_it_says": ("nothing", good[:-1]),
        "cut_after_a_byte": (bad, framed(payload[:1])),
        "cut_in_half": (bad, framed(payload[: len(payload) // 2])),
        "cut_before_the_last_byte": (bad, framed(payload[:-1])),
        "more_behind_it": (bad, framed(payload + b"\x00")),
        "as_large_as_allowed": (bad, framed(payload + bytes(MAX_MESSAGE_BYTES - len(payload)))),
        "a_byte_too_large": (bad, framed(payload + bytes(MAX_MESSAGE_BYTES + 1 - len(payload)))),
        "far_too_large": (bad, framed(bytes(2 * MAX_MESSAGE_BYTES))),
        "two_billion_bytes_to_come": (bad, b"\x7f\xff\xff\xff"),
        "a_web_request": (bad, b"GET / HTTP/1.1\r\nHost: kvatlas\r\n\r\n"),
        "a_tls_hello": ("bad_signature", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        "version_1_over_zeromq": ("unlike_versions", b"\xff" + bytes(8) + b"\x7f\x03"),
    }


def fields() -> dict[str, tuple[str, bytes]]:
    bad = "bad_handshake"
    said: dict[str, Any] = {
        "no_map": [1, 2, 3],
        "a_number": 7,
        "nothing_at_all": None,
        "unknown_tag": hello(type="goodbye"),
        "an_answer": {"type": "ok", "seconds": 1.0},
        "no_tag": without("type"),
        "no_name": without("name"),
        "no_rank": without("rank"),
        "unknown_field": hello(admin=True),
        "empty_name": hello(name=""),
        "long_name": hello(name="x" * 257),
        "megabyte_name": hello(name="x" * (1 << 20)),
        "name_of_bytes": hello(name=b"stranger"),
        "short_incarnation": hello(incarnation=bytes(15)),
        "long_incarnation": hello(incarnation=bytes(17)),
        "short_hash": hello(plan_hash=bytes(31)),
        "short_fingerprint": hello(fingerprint="00"),
        "other_fingerprint": hello(fingerprint="0" * 32),
        "version_as_text": hello(version="2"),
        "version_as_float": hello(version=1.5),
        "large_metadata": hello(metadata=bytes((1 << 18) + 1)),
        "other_transport": hello(transport="carrier pigeon"),
        "plan_as_map": hello() | {"plan": {}},
        "conversion_as_text": hello(conversion="fp8->bf16"),
        "conversion_without_a_name": hello(conversion={"scales": {}}),
        "negative_scale": hello(conversion=terms([-1.0, 1.0])),
        "infinite_scale": hello(conversion=terms([1.0, float("inf")])),
        "undefined_scale": hello(conversion=terms([float("nan"), 1.0])),
        "three_scales": hello(conversion=terms([1.0, 1.0, 1.0])),
        "too_many_scales": hello(conversion=terms(*[[1.0, 1.0]] * 16385)),
        "infinite_rank": hello(rank=float("inf")),
        "undefined_address": hello(memory=[registered(0, 0, 0) | {"address": float("nan")}]),
    }
    newer, old = VERSION + 1, without("identity") | {"version": 2, "oldest": 2}
    unlike = {f"version_{n}": hello(version=n, oldest=n) for n in (0, 1, newer, -1, 2**63)}
    unlike["newer_with_more_in_it"] = hello(version=newer, oldest=newer, more={"a": [1]})
    unlike["newer_and_unlike_ours"] = {"type": "hello", "version": newer, "oldest": newer}
    alike = {
        "newer_that_understands_ours": hello(version=newer),
        "version_3": hello(version=3),
        "version_4": hello(version=4),
        "newer_that_says_more": hello(version=newer, more={"a": [1, {}]}),
        "conversion_where_formats_are_alike": hello(conversion=terms([1.0, 1.0])),
    }
    return (
        {name: (bad, sealed(value)) for name, value in said.items()}
        | {name: ("unlike_versions", sealed(value)) for name, value in unlike.items()}
        | {name: ("welcome", sealed(value)) for name, value in alike.items()}
        | {"version_2": ("different_identity", sealed(old))}  # understood, but without an identity
    )


def numbers() -> dict[str, tuple[str, bytes]]:
    bad = "bad_handshake"
    pool = small("dense", tp=2).pools[0]
    changed: dict[str, Any] = {
        "negative_rank": {"rank": -1},
        "rank_too_large": {"rank": 2},
        "rank_far_too_large": {"rank": 65536},
        "negative_index": {"memory": [registered(-2, 1 << 30, pool.nbytes)]},
        "negative_address": {"memory": [registered(0, -(1 << 30), pool.nbytes)]},
        "negative_size": {"memory": [registered(0, 1 << 30, -pool.nbytes)]},
        "negative_device": {"memory": [registered(0, 1 << 30, pool.nbytes, -1)]},
        "device_past_all": {"memory": [registered(0, 1 << 30, pool.nbytes, 10_000)]},
        "kind_of_device_unknown": {
            "memory": [registered(0, 1 << 30, pool.nbytes) | {"kind": "abacus"}]
        },
        "address_past_all": {"memory": [registered(0, (1 << 62) + 8, pool.nbytes)]},
        "address_of_64_bits": {"memory": [registered(0, (1 << 64) - 8, pool.nbytes)]},
        "size_past_all": {"memory": [registered(0, 8, (1 << 62) + 1)]},
    }
    return {name: (bad, sealed(hello(**value))) for name, value in changed.items()}


def regions() -> dict[str, tuple[str, bytes]]:
    size, at = small("dense", tp=2).pools[0].nbytes, 1 << 30
    memory: dict[str, list[Json]] = {
        "no_regions": [],
        "staging_alone": [registered(-1, at, 4096)],
        "a_region_twice": [registered(0, at, size), registered(0, at + size, size)],
        "a_region_too_many": [registered(0, at, size), registered(1, at + size, size)],
        "another_region": [registered(1, at, size)],
        "a_byte_too_small": [registered(0, at, size - 1)],
        "empty_region": [registered(0, at, 0)],
        "misaligned": [registered(0, at + 4, size)],
        "at_address_zero": [registered(0, 0, size)],
        "overlapping": [registered(0, at, size), registered(-1, at + size - 1, 4096)],
        "one_inside_the_other": [registered(0, at, size), registered(-1, at + 64, 64)],
        "the_same_place": [registered(0, at, size), registered(-1, at, size)],
        "too_many_regions": [registered(i, at + i * size, size) for i in range(1025)],
    }
    answers = {"staging_alone": "welcome"}  # its pools are its own
    return {
        name: (answers.get(name, "bad_handshake"), sealed(hello(memory=some)))
        for name, some in memory.items()
    }


def plans() -> dict[str, tuple[str, bytes]]:
    other = small("sliding", tp=2)
    many: Json = {"regions": [{"layers": [{}] * 20_000}], "tp": 1, "pp": 1}
    huge = 10**9
    cases: dict[str, tuple[str, bytes]] = {
        "unknown_hash": ("send_plan", sealed(hello(plan_hash=bytes(32)) | {"plan": None})),
        "other_hash": ("bad_handshake", sealed(hello(plan_hash=bytes(32)))),
        "other_model": ("missing_layers", sealed(hello(other))),
        "models_mixed_up": ("bad_handshake", sealed(hello(fingerprint=fingerprint(other)))),
        "empty_plan": ("bad_handshake", sealed(hello(plan=b""))),
        "plan_is_no_json": ("bad_handshake", sealed(hello(plan=b"\x80\x04pickle"))),
        "plan_cut": ("bad_handshake", sealed(hello(plan=small("dense").to_json()[:-9]))),
        "plan_of_lists": ("bad_handshake", sealed(hello(plan=b"[" * 100_000))),
        "plan_of_maps": ("bad_handshake", sealed(hello(plan=b'{"a":' * 100_000))),
        "layers_of_lists": (
            "bad_handshake",
            sealed(hello(plan=b'{"regions":[{"layers":[' + b"[" * 100_000)),
        ),
        "many_layers": ("bad_handshake", sealed(hello(plan=json.dumps(many).encode()))),
        "empty_json": ("bad_handshake", sealed(hello(plan=b"{}"))),
        "more_in_the_plan": ("bad_plan", with_plan(put("more", 1))),
        "plan_of_a_newer_version": ("unlike_versions", with_plan(put("version", 3))),
        "newer_plan_in_another_form": ("unlike_versions", with_plan(newer)),
        "plan_that_says_its_version": ("welcome", with_plan(put("version", 1))),
        "plan_of_version_0": ("bad_handshake", with_plan(put("version", 0))),
        "wrong_order": ("bad_plan", with_plan(put("regions", 0, "layout", "LBNHH"))),
    }  # fmt: skip
    ranks: dict[str, Change] = {
        "many_regions": apart,
        "many_pools": lambda p: p.update(pp=1000, tp=1, pools=p["pools"] * 40_000),
        "a_billion_ranks": put("tp", huge),
        "a_billion_stages": put("pp", huge),
        "ranks_and_stages": lambda p: p.update(tp=100_000, pp=100_000),
        "no_ranks": put("tp", 0),
        "ranks_as_text": put("tp", "2"),
        "half_a_rank": put("tp", 1.5),
    }
    inside: dict[str, Change] = {
        "negative_ranks": lambda p: p.update(tp=-2, pp=-1),
        "a_billion_context_ranks": put("dcp", huge),
        "a_billion_blocks": put("pools", 0, "blocks", huge),
        "negative_blocks": put("pools", 0, "blocks", -1),
        "a_billion_groups": put("regions", 0, "group", huge),
        "pages_far_apart": put("regions", 0, "page_stride", 2**62),
        "blocks_in_one_place": put("regions", 0, "block_stride", 0),
        "a_billion_splits": put("regions", 0, "splits", huge),
        "a_billion_bytes_in_a_page": put("regions", 0, "page_bytes", huge),
        "a_billion_heads": put("regions", 0, "layers", 0, "spec", "heads", huge),
        "a_billion_elements": put("regions", 0, "layers", 0, "spec", "head_dim", huge),
        "a_billion_tokens_in_a_block": put("groups", 0, "block", huge),
        "negative_offset": put("regions", 0, "offset", -8),
        "an_offset_past_all": put("regions", 0, "offset", 2**62),
        "a_number_past_all": put("memory", 10**30),
        "no_memory": put("memory", 1),
        "a_billion_parts": put("regions", 0, "parts", [huge, huge]),
    }
    cases |= {name: ("bad_handshake", with_plan(change)) for name, change in ranks.items()}
    return cases | {name: ("bad_plan", with_plan(change)) for name, change in inside.items()}


def newer(made: Json) -> None:
    """A plan of a later version, whose regions are of no form that is known today."""
    made.update(version=3, regions={"by": "layer"}, more=1)


def apart(made: Json) -> None:
    """Each layer of many in a region of its own: sound, and much to check."""
    (region,) = made["regions"]
    first = region["layers"][0]
    layers = [first | {"name": f"layers.{i}.attn", "index": i} for i in range(8000)]
    made["regions"] = [region | {"layers": [one], "group": n} for n, one in enumerate(layers)]
    made["groups"] *= len(layers)


def bombs() -> dict[str, tuple[str, bytes]]:
    """Few bytes that claim to be many."""
    raw = {
        "four_billion_items": b"\xdd\xff\xff\xff\xff",
        "four_billion_pairs": b"\xdf\xff\xff\xff\xff",
        "four_billion_characters": b"\xdb\xff\xff\xff\xff",
        "four_billion_bytes": b"\xc6\xff\xff\xff\xff",
        "deep_lists": b"\x91" * 200_000,
        "deep_maps": b"\x81\xa1a" * 200_000,
        "an_extension": b"\xc9\xff\xff\xff\xff\x01",
    }
    said = {name: ("bad_handshake", framed(text)) for name, text in raw.items()}
    inside = msgspec.msgpack.encode(hello(metadata=b"mark"))
    claims = inside.replace(b"\xc4\x04mark", b"\xc6\xff\xff\xff\xffmark")
    said["metadata_that_claims_to_be_large"] = ("bad_handshake", framed(claims))
    return said


def announcements() -> dict[str, tuple[str, bytes]]:
    """Pushes of peers without a session, as they are today and as they were."""
    good = {
        "type": "announce", "session": bytes(16), "request": "r", "offer": "o",
        "endpoint": "tcp://127.0.0.1:1", "start": 0, "stop": 50, "seconds": 1.0,
    }  # fmt: skip
    changed: dict[str, Json] = {
        "announced_from_nowhere": {"endpoint": ""},
        "announced_from_afar": {"endpoint": "tcp://" + 507 * "x"},
        "announced_with_a_long_name": {"offer": 257 * "x"},
        "announced_by_pigeon": {"how": "by pigeon"},
        "announced_before_its_start": {"start": -1},
        "announced_for_ever": {"seconds": float("inf")},
        "announced_with_more_in_it": {"admin": True},
    }
    fetch = {"type": "fetch", "session": bytes(16), "lease": bytes(16), "start": 0, "stop": 9}
    return {
        "announced_without_a_session": ("unknown_session", sealed(good)),
        "fetched_as_in_version_3": ("bad_handshake", sealed(fetch)),
    } | {name: ("bad_handshake", sealed(good | one)) for name, one in changed.items()}


def main() -> None:
    for old in HERE.glob("*.z"):
        old.unlink()
    answers = {}
    for name, (answer, some) in sorted(cases().items()):
        (HERE / f"{name}.z").write_bytes(zlib.compress(some, 9))
        answers[name] = answer
    (HERE / "expected.json").write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    main()
