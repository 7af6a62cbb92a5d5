"""Triton's interpreter, with less of its own work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

# `make test` asks Triton to interpret; on a GPU the same cases are run by tests/gpu.
if os.environ.get("TRITON_INTERPRET", "0") == "0":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def patched_once_a_launch() -> Iterator[None]:
    """Triton's language is made interpretable once a launch, not in every device function.

    The interpreter looks through all of `triton.language` again whenever one device function
    calls another, where the launch has done so already: two fifths of the time of these tests.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    # Older interpreters patch in another way: they stay as they are.
    if not hasattr(interpreter, "_LangPatchScope"):
        yield
        return
    patch_language, patched = interpreter._patch_lang, set[tuple[str, ...]]()

    def patch_what_is_new(function: Any) -> Any:
        seen = tuple(name for name in ("tl", "core", "language") if name in function.__globals__)
        if seen in patched:
            return None
        scope, launch = patch_language(function), not patched
        patched.add(seen)
        restore = scope.restore

        def restore_and_forget() -> None:
            patched.clear()
            restore()

        scope.restore = restore_and_forget if launch else restore
        return scope

    interpreter._patch_lang = patch_what_is_new
    yield
    interpreter._patch_lang = patch_language


@pytest.fixture(scope="session", autouse=True)
def no_unused_checks() -> None:
    """Skip checks whose results the interpreter ignores, and look up each dtype once.

    Without `debug`, the interpreter computes whether each sum and product of integers overflows,
    but asserts nothing: this took more than two fifths of the time of these tests.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    look_up, found = interpreter._get_np_dtype, dict[str, Any]()

    def look_up_once(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = look_up(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = look_up_once


@pytest.fixture(scope="session", autouse=True)
def attributes_made_once() -> None:
    """Derive the shape and the dtype of a tensor once for each type object, not for each tensor.

    The interpreter makes some ten thousand tensors in a call of attention.
    """
    tensor = pytest.importorskip("triton.language").tensor
    make, found = tensor.__init__, "_attributes_of_tensors"

    def make_once(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        attributes = type.__dict__.get(found)
        if attributes is None:
            make(self, handle, type)
            attributes = {name: one for name, one in vars(self).items() if name != "handle"}
            setattr(type, found, attributes)
        else:
            vars(self).update(attributes, handle=handle)

    tensor.__init__ = make_once


@pytest.fixture(scope="package", autouse=True)
def few_programs() -> Iterator[None]:
    """Merge with few programs of many rows each.

    The interpreter runs programs in turn, and most of those that a GPU would run at once find no
    row to merge: a third of the time of a call of attention.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvatlas.kernels.triton.attention.launch.MERGED_AT_ONCE", 8)
        yield
