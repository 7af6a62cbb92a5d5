"""Requests that are offered before they are there: each layer is read once it was written."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.wire import Session, Transfer
from tests.wire.helpers import End, assert_arrived, ends, small


def test_layers_are_read_as_they_are_written() -> None:
    """The first arrives while the last is not there yet; over stages that have some each."""
    source = End(small("dense", pp=2), 40, seed=1)
    target = End(small("dense", layout="LBHNC"), 40, seed=2)
    names = list(source.plan.layers)
    with ends(source, target):
        for node in source.nodes:
            node.offer("r", source.blocks, 40, layered=True)
        with Session(target.nodes[0], source.endpoints) as session:
            transfer = session.pull("r", destination_blocks=target.blocks, tokens=40, streamed=True)
            for number, name in enumerate(names):
                assert transfer.layers <= set(names[:number])
                stage = source.plan.region_of(name)[0].stage
                source.nodes[stage].layer_written("r", name)
                assert transfer.wait_layers([name], 10) is transfer
                assert name in transfer.layers
            assert transfer.wait(10).ready
            assert transfer.wait_layers(names).ready
        assert_arrived(source, target, 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_layers_that_were_not_asked_for_are_not_here(streamed: bool) -> None:
    with ends(End(small("dense"), 40, seed=1), End(small("dense"), 40, seed=2)) as (src, dst):
        names = list(src.plan.layers)
        src.offer("r")
        with Session(dst.nodes[0], src.endpoints) as session:
            about: Any = {"destination_blocks": dst.blocks, "tokens": 40, "streamed": streamed}
            done = session.pull("r", layers=names[:1], **about)
            assert done.wait_layers(names[:1]).wait(10).ready
            with pytest.raises(AtlasError) as refused:
                done.wait_layers(names[1:2])
            assert refused.value.code is Code.UNKNOWN_LAYER
            assert session.pull("r", **about).wait_layers(names).wait(10).ready


def test_who_waits_for_layers_hears_of_the_end_and_of_the_time() -> None:
    """A whole transfer has all of them at once; one that fails says why; others are late."""
    whole = Transfer("r", ranks=(0,), total=None, timeout=30)
    with pytest.raises(AtlasError) as refused:
        whole.wait_layers(["a", "b"], 0.01)
    assert refused.value.code is Code.DEADLINE
    whole.finished(0)
    assert whole.wait_layers(["a", "b"]).ready
    some = Transfer("r", ranks=(0,), total=None, timeout=30, layers=("a", "b"))
    some.finished(0)
    assert some.wait_layers(["a", "b"]).ready
    for others in (["a", "c"], "layers"):
        with pytest.raises(AtlasError) as refused:
            some.wait_layers(others)
        assert refused.value.code is Code.UNKNOWN_LAYER
    failing = Transfer("r", ranks=(0, 1), total=None, timeout=30)
    failing.add_layer(0, "a")
    threading.Timer(0.05, failing.cancel).start()
    with pytest.raises(AtlasError) as refused:
        failing.wait_layers(["a"])
    assert refused.value.code is Code.CANCELLED


def test_a_whole_pull_waits_for_all_layers() -> None:
    source, target = End(small("dense"), 40, seed=1), End(small("dense"), 40, seed=2)
    names = list(source.plan.layers)
    with ends(source, target):
        for how in ("direct", "staged"):
            source.nodes[0].offer("r", source.blocks, 40, layered=True)
            with Session(target.nodes[0], source.endpoints) as session:
                about = {"destination_blocks": target.blocks, "tokens": 40}
                transfer = session.pull("r", **about, how=how)  # type: ignore[arg-type]
                for name in names:
                    assert not transfer.moved
                    source.nodes[0].layer_written("r", name)
                assert transfer.wait(10).ready
        assert_arrived(source, target, 0)


def test_a_layer_that_is_never_written_ends_with_the_offer() -> None:
    source, target = End(small("dense"), 40, seed=1), End(small("dense"), 40, seed=2)
    with ends(source, target):
        source.nodes[0].offer("r", source.blocks, 40, layered=True, timeout=0.4)
        with Session(target.nodes[0], source.endpoints) as session:
            about = {"destination_blocks": target.blocks, "tokens": 40, "streamed": True}
            with pytest.raises(AtlasError) as refused:
                session.pull("r", **about).wait(10)  # type: ignore[arg-type]
            assert refused.value.code is Code.LEASE_EXPIRED
        target.buffers[0].assert_untouched()


def test_bad_calls_about_layers() -> None:
    source = End(small("dense"), 40, seed=1)
    node, name = source.nodes[0], next(iter(source.plan.layers))
    with ends(source):
        node.offer("whole", source.blocks, 40)
        node.offer("layers", source.blocks, 40, layered=True)
        node.layer_written("layers", name)
        for request, layer, code in (
            ("whole", name, Code.UNKNOWN_REQUEST),
            ("nothing", name, Code.UNKNOWN_REQUEST),
            ("layers", "no layer", Code.UNKNOWN_LAYER),
            ("layers", name, Code.UNKNOWN_LAYER),
        ):
            with pytest.raises(AtlasError) as refused:
                node.layer_written(request, layer)
            assert refused.value.code is code
