"""The planner's setting `KVATLAS_PLAN`, and helpers that replace vLLM's functions."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code

SETTING = "KVATLAS_PLAN"

log = logging.getLogger("vllm.kvatlas.planner")
"""A child of vLLM's logger, so that messages appear in vLLM's log."""


class PlannerSetting(msgspec.Struct, frozen=True):
    """The value of `KVATLAS_PLAN`."""

    on: bool = False
    pack: int | None = None
    """Attention layers per recurrent state; None for the smallest blocks."""

    @classmethod
    def read(cls, text: str | None) -> PlannerSetting:
        """Parse the value of `KVATLAS_PLAN`; `text` is None if the variable is not set.

        >>> PlannerSetting.read(None), PlannerSetting.read("atlas,pack=4")
        (PlannerSetting(on=False, pack=None), PlannerSetting(on=True, pack=4))
        >>> PlannerSetting.read("small")
        Traceback (most recent call last):
        kvatlas.errors.AtlasError: KVATLAS_PLAN has an unknown value. Got 'small'. \
Set it to atlas or atlas,pack=N, or unset it. [bad_config]
        """
        policy, _, option = (text or "vllm").partition(",")
        name, _, number = option.partition("=")
        if (policy == "vllm" and not option) or (policy == "atlas" and not option):
            return cls(on=policy == "atlas")
        if policy == "atlas" and name == "pack" and number.isdecimal() and int(number):
            return cls(on=True, pack=int(number))
        raise AtlasError(
            Code.BAD_CONFIG,
            f"{SETTING} has an unknown value",
            got=repr(text),
            hint="Set it to atlas or atlas,pack=N, or unset it",
        )


def refuse_release(got: str) -> AtlasError:
    """Return the error for a release of vLLM that the planner does not support."""
    hint = f"Use vLLM 0.32 or 0.33, or unset {SETTING}"
    problem = f"{SETTING} is set, but the planner does not support this version of vLLM"
    return AtlasError(Code.ENGINE_REFUSES, problem, got=got, hint=hint)


def checked(function: Callable[..., Any], *parameters: str) -> Callable[..., Any]:
    """Return `function`, a function of vLLM, or raise an error if its parameters have changed.

    >>> checked(len, "obj") is len
    True
    >>> checked(len, "object")
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: KVATLAS_PLAN is set, but the planner does not support this version \
of vLLM. Got len(obj), expected len(object). Use vLLM 0.32 or 0.33, or unset \
KVATLAS_PLAN. [engine_refuses]
    """
    names = tuple(inspect.signature(function).parameters)
    if names != parameters:
        name, found, wanted = function.__name__, ", ".join(names), ", ".join(parameters)
        raise refuse_release(f"{name}({found}), expected {name}({wanted})")
    return function


def replace_once(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace a function of vLLM by `wrap(function)`; a second call has no effect."""
    function = getattr(owner, name)
    if getattr(function, "of_kvatlas", False):
        return
    wrapped = functools.wraps(function)(wrap(function))
    vars(wrapped)["of_kvatlas"] = True
    # A method of a class is bound already, so the replacement takes no `cls`.
    setattr(owner, name, staticmethod(wrapped) if inspect.ismethod(function) else wrapped)
