"""The page `docs/reference/data/vllm_pairings.md`: 120 pairings under two connectors.

`python -m tests.routing.pairings_page` moves every one, byte by byte, and prints the page.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping

from tests.routing.pairings import PAIRINGS, Pairing, move_pairing, vllm_verdict

_PAGE = """\
# 120 pairings of two vLLM engines

The table lists 120 pairings of a prefill engine and a decode engine whose tensor parallelism (`tp`),
layout or block size differ, for attention, windows, latent attention, packed caches and hybrids.

{counts}

| | meaning |
|---|---|
| right | every byte arrives in its place, and no other byte changes |
| *refused* | the engines do not exchange caches |
| **corrupt** | the engine accepts the bytes, and they are wrong |

*vLLM* is the result of vLLM 0.32's NixlConnector: its worker ran, every descriptor was executed and
every byte compared. *kvatlas* is the result of a route between the same engines, with plans of both
policies: real bytes in buffers of those shapes, all of them compared. Hybrids in BHLNC are planned by
kvatlas only, because vLLM has no plan in that layout. `kvatlas doctor` predicts the result for two of
your own engines.

A command moves all pairings and generates this page, and a test compares the two:

```sh
make docs-pairings
```

"""  # noqa: E501
_HEAD = """\
## {kind}

| prefill | decode | what else | vLLM | kvatlas |
|---|---|---|---|---|
"""
_KINDS = (
    ("Attention", ("dense", "GQA")),
    ("Packed caches", ("packed",)),
    ("Windows", ("swa",)),
    ("Latent attention", ("MLA",)),
    ("Hybrids", ("hybrid", "Qwen")),
)
_MARKS = {"right": "right", "refused": "*refused*", "corrupt": "**corrupt**"}


def page(verdicts: Mapping[str, str]) -> str:
    """The whole page, in Markdown, with what kvatlas made of each pairing by its name."""
    vllm = Counter(vllm_verdict(pairing.name) for pairing in PAIRINGS)
    ours = Counter(verdicts[pairing.name] for pairing in PAIRINGS)
    rows = [f"| {name} | {vllm[name]} | {ours[name]} |" for name in _MARKS]
    counts = "\n".join(("| | vLLM | kvatlas |", "|---|--:|--:|", *rows))
    text = _PAGE.format(counts=counts)
    for kind, beginnings in _KINDS:
        mine = [one for one in PAIRINGS if one.name.startswith(beginnings)]
        lines = (_line(pairing, verdicts[pairing.name]) for pairing in mine)
        text += _HEAD.format(kind=kind) + "".join(lines) + "\n"
    return text.rstrip() + "\n"


def _line(pairing: Pairing, verdict: str) -> str:
    sides = [_side(how) for how in (pairing.source, pairing.destination)]
    marks = (_MARKS[vllm_verdict(pairing.name)], _MARKS[verdict])
    return f"| {' | '.join((*sides, _more(pairing), *marks))} |\n"


def _side(how: Mapping[str, object]) -> str:
    words = [f"tp {how['tp']}", str(how["layout"] or "")]
    words += [f"block {how['block_size']}"] if "block_size" in how else []
    return ", ".join(filter(None, words))


def _more(pairing: Pairing) -> str:
    """What of a pairing its two sides do not say."""
    name, words = pairing.name, []
    for mark, said in (
        ("2 kv heads", "2 kv heads"),
        ("6 heads", "6 kv heads"),
        ("permute_local_kv", "`enable_permute_local_kv`"),
        ("nvfp4", "nvfp4"),
        ("kvplanes", "K and V in planes"),
        ("gdn", "gated delta net"),
        ("mamba2 n_groups=8", "Mamba2 of 8 groups"),
        ("mamba2 n_groups=1", "Mamba2 of one group"),
        ("Qwen3.5", "Qwen3.5-397B's heads"),
        ("apc=False", "no prefix caching"),
    ):
        if mark in name:
            words.append(said)
    return ", ".join(words)


def main() -> None:
    """Move every pairing, and print the page."""
    verdicts = {}
    for pairing in PAIRINGS:
        try:
            move_pairing(pairing)
            verdicts[pairing.name] = "right"
        except AssertionError:
            verdicts[pairing.name] = "corrupt"
    sys.stdout.write(page(verdicts))


if __name__ == "__main__":
    main()
