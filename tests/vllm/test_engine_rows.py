"""vLLM and transformers store the same rows: equal names and elements, and equal tokens after them.

The families are those that `kvatlas.models.row_identity` names. In all other families, engines of
different kinds do not find each other's rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvatlas.engines.transformers import AtlasCache, PrefixReuse
from kvatlas.models.row_identity import COMPARED
from tests.tier.store_servers import missing, running
from tests.vllm.comparing import assert_nothing_held, assert_same, atlas, prompt
from tests.vllm.engine_process import Answer, engine
from tests.vllm.models import CONFIGS, checkpoint

NEW, ASKED = 8, 230
COMPUTED = ASKED + NEW - 1
"""The last token is never given to the model."""
STATES: dict[str, Any] = {"block_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"block_size": 64, "tensor_parallel_size": 2},
    "llama_scaled": {"block_size": 64},
    "llama_linear": {"block_size": 64},
    "qwen3": {"block_size": 64},
    "mistral": {"block_size": 64},
    "gemma3": {"block_size": 32},
    "gpt_oss": {"block_size": 128},
    "granite": STATES,
}
"""Models that are compared, and the vLLM engine of each."""
NOT_COMPARED = {"llama4": {"block_size": 64}}
ORDERS = {"llama": "BHLNC", "gemma3": "BLNHC"}
"""Orders of the caches in transformers; LBNHC for all others."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}


class Transformers:
    """A model in transformers, with a tier, and what it answers without one."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def alone(self, asked: list[int]) -> Answer:
        """The greedy answer on transformers' own cache."""
        return self._answer(asked, None)

    def with_tier(self, where: str, asked: list[int]) -> tuple[int, Answer]:
        """How many tokens are found in a tier, and the answer, which is stored there."""
        about: dict[str, Any] = {"layout": ORDERS.get(self._name, "LBNHC"), "prefix_caching": True}
        cache = AtlasCache.from_config(self._model.config, batch=2, max_len=512, **about)
        reuse = PrefixReuse(self._model, cache, where, timeout=60.0, staging=8 << 20)
        found = reuse.begin(asked)
        answer = self._answer(asked, cache)
        reuse.end(asked + answer.tokens)
        reuse.close()
        return found, answer

    def _answer(self, asked: list[int], cache: AtlasCache | None) -> Answer:
        ids = torch.tensor([asked])
        about: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        about |= {"attention_mask": torch.ones_like(ids), "output_scores": True}
        out = self._model.generate(
            ids, past_key_values=cache, return_dict_in_generate=True, **about
        )
        tokens = out.sequences[0, len(asked) :].tolist()
        chosen = [
            float(torch.log_softmax(scores[0], -1)[token])
            for scores, token in zip(out.scores, tokens, strict=True)
        ]
        return Answer(tokens, chosen, None, "length")


def objects(folder: Path) -> dict[str, np.ndarray]:
    """The elements of every object of a store, by name. All fields are fp32."""
    found = (path for path in folder.rglob("*/*.*-*/*") if path.name.isdigit())
    return {
        str(path.relative_to(folder)): np.frombuffer(path.read_bytes()[64:], np.float32)
        for path in found
    }


def stored_by_both(
    name: str, checkpoints: Path, tmp_path: Path, options: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Transformers, Answer]:
    """The objects that vLLM and transformers store for one request."""
    folder = checkpoint(name, checkpoints)
    one, other = tmp_path / "vllm", tmp_path / "transformers"
    with engine(
        folder, name=name, connector=atlas(transport="none", tier=f"folder://{one}"), **options
    ) as served:
        said = served.generate(prompt(ASKED), tokens=NEW)
        assert_nothing_held(served)
    made = Transformers(name, folder)
    found, answer = made.with_tier(f"folder://{other}", prompt(ASKED))
    assert found == 0
    assert_same(answer, said, name)
    return objects(one), objects(other), made, answer


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_both_engines_have_equal_names_and_elements(
    name: str, checkpoints: Path, tmp_path: Path
) -> None:
    """A large magnitude of the elements shows that equal rows are not equal because all are 0."""
    theirs, ours, made, answer = stored_by_both(name, checkpoints, tmp_path, FAMILIES[name])
    both = ours.keys() & theirs.keys()
    for row_kind in "01":  # of rows that both store; engines store states at other positions
        kinds = [{name.split("/")[4][0] for name in some} for some in (ours, theirs, both)]
        assert (row_kind in kinds[2]) == (row_kind in kinds[0]) == (row_kind in kinds[1])
    assert len(both) > 3
    for one in both:
        np.testing.assert_allclose(theirs[one], ours[one], rtol=0, atol=1e-4, err_msg=one)
        assert np.abs(ours[one]).max() > 0.1, one
    more = prompt(ASKED) + answer.tokens + prompt(30, 5)
    found, after = made.with_tier(f"folder://{tmp_path}/vllm", more)
    expected = COMPUTED if name in PARTIAL else COMPUTED // 64 * 64
    assert found == expected
    assert_same(made.alone(more), after, (name, "after the rows of vLLM"))


PARTIAL = {"mistral", "gemma3", "gpt_oss", "granite"}
"""Models with windows or states, which are stored at the end of a request too."""


def test_every_family_that_has_a_name_for_its_order_is_compared() -> None:
    import transformers

    types = {getattr(transformers, CONFIGS[name][0]).model_type for name in FAMILIES}
    assert types == COMPARED.keys()


def test_engines_that_order_elements_differently_do_not_share_names(
    checkpoints: Path, tmp_path: Path
) -> None:
    """Llama 4: vLLM permutes the weights of K, so that pairs of elements are half a head apart."""
    theirs, ours, *_ = stored_by_both("llama4", checkpoints, tmp_path, NOT_COMPARED["llama4"])
    assert not ours.keys() & theirs.keys()
    by_row = {name.split("/", 3)[3]: elements for name, elements in theirs.items()}
    assert {name.split("/", 3)[3] for name in ours} <= by_row.keys()
    for name, elements in ours.items():
        there = by_row[name.split("/", 3)[3]].reshape(-1, 64)  # K and V of a head and token
        here = elements.reshape(-1, 64)
        assert np.abs(there - here).max() > 0.1
        k = here[:, :32].reshape(-1, 16, 2).swapaxes(1, 2).reshape(-1, 32)
        np.testing.assert_allclose(there[:, :32], k, rtol=0, atol=1e-4)
        np.testing.assert_allclose(there[:, 32:], here[:, 32:], rtol=0, atol=1e-4)


@pytest.mark.skipif(bool(missing("s3")), reason=missing("s3") or "it is here")
def test_two_vllm_engines_and_transformers_share_a_bucket(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three engines of unlike topology goes on from the rows of each of the others."""
    for variable, value in CREDENTIALS.items():
        monkeypatch.setenv(variable, value)
    folder, whole = checkpoint("llama", checkpoints), COMPUTED // 64 * 64
    made = Transformers("llama", folder)
    with running("s3", tmp_path) as port:
        where = f"s3://bucket/rows?region=us-east-1&timeout=60&endpoint=http://127.0.0.1:{port}"
        about: dict[str, Any] = {
            "connector": atlas(transport="none", tier=where, tier_options={"deadline": 60.0}),
            "environment": CREDENTIALS,
        }
        asks: dict[str, Any] = {}
        with (
            engine(folder, name="tp 2", block_size=64, tensor_parallel_size=2, **about) as one,
            engine(folder, name="tp 1", core="1", block_size=128, **about) as other,
        ):
            for served in (one, other):

                def ask(tokens: list[int], served: Any = served) -> tuple[int, Answer]:
                    said = served.generate(tokens, tokens=NEW)
                    served.idle()
                    return said.cached, said

                asks[served.process.name] = ask
            asks["transformers"] = lambda tokens: made.with_tier(where, tokens)
            for seed, (writer, write) in enumerate(asks.items(), start=1):
                begun = prompt(ASKED, seed)
                found, first = write(begun)
                assert found == 0
                assert_same(made.alone(begun), first, writer)
                for number, (reader, read) in enumerate(asks.items()):
                    if reader != writer:
                        more = begun + first.tokens + prompt(30, 10 + number)
                        found, after = read(more)
                        assert found == whole, (writer, reader)
                        assert_same(made.alone(more), after, (writer, reader))
            assert_nothing_held(one, other)
