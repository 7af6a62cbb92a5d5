"""`kvatlas doctor`: two engines by their arguments, and everything that can be wrong with them."""

from __future__ import annotations

import json
import re
import socket
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from kvatlas.engines.vllm import EngineArguments, diagnose
from tests.cli.helpers import kvatlas, said, shown
from tests.wire.child import Rank
from tests.wire.helpers import small

FLAG = {
    "kv_connector": "KVAtlasConnector",
    "kv_connector_module_path": "kvatlas.engines.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def engine(extra: dict[str, Any] | None = None, flag: Any = None, **arguments: Any) -> Any:
    """An engine with its connector; `extra` are the connector's settings."""
    transfer = (
        FLAG | (flag or {}) | {"kv_connector_extra_config": {"transport": "shm"} | (extra or {})}
    )
    given = {"model": "Qwen3-8B", "kv_transfer_config": transfer} | arguments
    return EngineArguments.of_values(given)


def verdicts(one: Any, other: Any) -> dict[str, str]:
    """Whatever is not right."""
    found = diagnose(one, other)
    assert found.ok == all(finding.verdict != "no" for finding in found.findings)
    return {f.what: f.verdict for f in found.findings if f.verdict != "ok"}


def test_engines_of_unlike_topology_understand_each_other() -> None:
    out = shown("doctor", "Qwen3-8B", "--from", "tp=2,block-size=64", "--to", "layout=HND")
    can = "These engines can exchange caches (connector not checked)."
    assert out.splitlines()[-1] == can
    assert "1,000 tokens take 141 MiB in" in out
    answer = said("doctor", "gpt-oss-20b", "--from", "tp=2", "--to", "tp=8", "--tokens", "500")
    assert answer["ok"]
    assert answer["moves"]["tokens"] == 500
    names = [finding["what"] for finding in answer["findings"]]
    assert {"model", "cache dtype", "ranks", "layout", "block", "groups", "windows"} <= set(names)
    hybrid = said("doctor", "Qwen3.5-397B-A17B", "--from", "tp=4", "--to", "tp=2")
    assert "recurrent states" in [finding["what"] for finding in hybrid["findings"]]


def test_engines_that_do_not_are_told_apart_by_what_is_unlike() -> None:
    for source, target, what in (
        ("", "kv-cache-dtype=fp8", "cache dtype"),
        ("kv-dtype=fp8", "", "cache dtype"),
        ("dtype=float16", "", "cache dtype"),
        ("tp=2", "tp=3", "plan"),
        ("layout=LBNHH", "", "plan"),
        ("backend=CPU_ATTN", "backend=CPU_ATTN", "backend"),
    ):
        result = kvatlas("doctor", "Llama-3.1-8B", "--from", source, "--to", target)
        assert result.exit_code == 1, (source, target, result.output)
        last = " ".join(result.output.split()).rpartition("These engines")[2]
        assert f"cannot exchange caches. {what.capitalize()}:" in last
    other = diagnose(*(EngineArguments(model=name) for name in ("Qwen3-8B", "gpt-oss-20b")))
    assert [f.what for f in other.findings if f.verdict == "no"] == ["model"]
    assert other.moves is None


def test_what_arguments_and_settings_say_is_looked_at() -> None:
    assert verdicts(engine(), engine()) == {}
    no: dict[str, tuple[Any, Any]] = {
        "connector": (engine(), engine(flag={"kv_connector": "NixlConnector"})),
        "role": (engine(flag={"kv_role": "kv_consumer"}), engine()),
        "transport": (engine(), engine({"transport": "mooncake"})),
        "ports": (engine({"ports": 7600}), engine({"ports": 7600})),
        "address": (engine({"listen": "10.0.0.5", "unprotected": True}), engine()),
        "speculation": (engine(speculative_config={"method": "eagle"}), engine()),
    }
    for what, ends in no.items():
        assert verdicts(*ends).get(what) == "no", what
    assert verdicts(engine(), engine(speculative_config={"method": "ngram"})) == {}
    bad = diagnose(engine(), engine({"lease_second": 3}))
    assert "lease_seconds" in bad.answer
    missing = diagnose(engine(), EngineArguments.of_command("vllm serve Qwen3-8B"))
    assert "kv-transfer-config" in missing.answer
    assert verdicts(engine(), engine(flag={"kv_load_failure_policy": "fail"})) == {
        "failed reads": "look"
    }
    far = {"listen": "10.0.0.5", "ports": 7600, "transport": "nixl"}
    assert verdicts(engine(far), engine(far | {"listen": "10.0.0.6"})).get("secret") == "no"
    shared = engine({"listen": "10.0.0.5"}), engine({"listen": "10.0.0.6"})
    assert verdicts(*shared).get("transport") == "no", "shared memory is of one host"
    apart = [engine(model="gemma-3-27b", disable_hybrid_kv_cache_manager=off) for off in (0, 1)]
    assert verdicts(*apart) == {"hybrid manager": "look"}
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        busy = engine({"ports": used.getsockname()[1]})
        assert verdicts(busy, engine()) == {"ports": "look"}


def own_network_address() -> str:
    """An address of this host that other hosts could reach; empty without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # a datagram socket sends nothing when it connects
        except OSError:
            return ""
        return str(probe.getsockname()[0])


OWN = own_network_address()
needs_network = pytest.mark.skipif(not OWN, reason="this host has no network address")


def test_a_setting_beside_the_role_is_refused_with_its_place() -> None:
    for key, words in (
        ("secret_file", "put it into kv_connector_extra_config"),
        ("secretfile", "did you mean 'secret_file' in kv_connector_extra_config?"),
        ("kv_roles", "did you mean 'kv_role'?"),
        ("zebra", "the settings of the connector are keys of kv_connector_extra_config."),
    ):
        found = diagnose(engine(flag={key: "x"}), engine())
        assert not found.ok
        assert f"Connector: unknown key {key!r} in kv_transfer_config: {words}" in found.answer
        assert "?." not in found.answer
    inside = diagnose(engine({"kv_load_failure_policy": "fail"}), engine()).answer
    assert "unknown key: 'kv_load_failure_policy'. Put it into kv_transfer_config" in inside
    near = diagnose(engine({"secretfile": "x"}), engine()).answer
    assert near.endswith("contains an unknown key: 'secretfile'. Did you mean 'secret_file'?")


def test_engines_without_their_connectors_are_said_to_be_half_checked() -> None:
    plans = [EngineArguments.of_changes("Qwen3-8B", text) for text in ("tp=2", "kv-dtype=auto")]
    assert not diagnose(*plans).connector_checked
    assert "(connector not checked)" in diagnose(*plans).answer
    assert diagnose(engine(), engine()).answer == "These engines can exchange caches."


@needs_network
def test_a_transport_is_opened_on_the_host_of_its_engine_only(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x" * 32)
    shared = {"ports": 7600, "secret_file": str(tmp_path / "secret"), "transport": "auto"}
    ends = [engine(shared | {"listen": host}) for host in (OWN, "198.51.100.6")]
    for pair in (ends, ends[::-1]):
        assert "transport" not in verdicts(*pair)
        row = next(f for f in diagnose(*pair).findings if f.what == "transport")
        assert "198.51.100.6 is not an address of this host: not checked" in row.why
    far = [engine(shared | {"listen": host}) for host in ("198.51.100.5", "198.51.100.6")]
    assert verdicts(*far) == {"transport": "look"}
    no_rdma = {"transport": "nixl", "transport_options": {"device": "eth0"}, "listen": OWN}
    refused = engine(shared | no_rdma), engine(shared | no_rdma | {"ports": 7700})
    assert verdicts(*refused)["transport"] == "no", "the engine would refuse it at startup"


@needs_network
def test_a_secret_without_cryptography_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x" * 32)
    settings = {"secret_file": str(tmp_path / "secret"), "transport": "auto", "listen": OWN}
    ends = [engine(settings | {"ports": port}) for port in (7600, 7700)]
    assert verdicts(*ends) == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cryptography", None)  # an import then fails
        found = diagnose(*ends)
    rows = {f.what: f for f in found.findings}
    assert rows["secret"].verdict == rows["transport"].verdict == "no"
    assert "pip install 'kvatlas[wire]'" in rows["secret"].why
    assert "encrypted" not in rows["transport"].why


def test_secrets_are_there_long_and_the_same(tmp_path: Path) -> None:
    for name, text in (("a", "x" * 32), ("b", "y" * 32), ("short", "x")):
        (tmp_path / name).write_text(text + "\n")

    def with_secret(name: str | None) -> Any:
        return engine({"secret_file": str(tmp_path / name)} if name else {})

    assert verdicts(with_secret("a"), with_secret("a")) == {}
    for one, other, verdict in (
        ("a", "b", "no"), ("a", None, "no"), ("short", "short", "no"), ("a", "gone", "look"),
    ):  # fmt: skip
        assert verdicts(with_secret(one), with_secret(other)) == {"secret": verdict}, (one, other)
    found = json.dumps(diagnose(with_secret("a"), with_secret("b")).as_dict())
    assert "x" * 32 not in found, "secrets are not shown"


def checkpoint(folder: Path, weights: bytes = b"weights", **changed: Any) -> str:
    """A folder with the config of a small model, and a file in place of its weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16", "rope_theta": 10000.0, "intermediate_size": 256,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changed))
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


def test_weights_and_configs_of_checkpoints_are_compared(tmp_path: Path) -> None:
    base, same = (checkpoint(tmp_path / name) for name in ("base", "same"))
    tuned = checkpoint(tmp_path / "tuned", b"WEIGHTS")
    longer = checkpoint(tmp_path / "longer", rope_theta=5e5)

    def found(one: Any, other: Any) -> str | None:
        return verdicts(one, other).get("weights")

    def served(model: str, **about: Any) -> Any:
        settings = about.pop("settings", {})
        return engine(settings, model=model, dtype="float16", **about)

    assert found(served(base), served(same)) is None, "paths do not count"
    assert found(served(base), served(tuned)) == "no"
    assert found(served(base), served(longer)) == "no"
    unchecked = {"check_identity": False}
    assert found(served(base, settings=unchecked), served(tuned)) == "no", "both must accept it"
    both = [served(name, settings=unchecked) for name in (base, tuned)]
    assert found(*both) == "look"
    theta = {"hf_overrides": {"rope_theta": 5e5}}
    assert found(served(base, **theta), served(base)) == "no"
    assert found(served(base, **theta), served(longer)) is None, "the same after the override"
    assert found(served(base, quantization="fp8"), served(base)) == "no"
    named = {"settings": {"weights_identity": "v7"}}
    assert found(served(base, **named), served(tuned, **named)) is None
    assert found(served(base, **named), served(base)) == "no"
    assert found(served(base, load_format="dummy"), served(base)) == "no"
    assert found(served(base, load_format="dummy", **named), served(base, **named)) is None


def test_weights_that_are_not_on_this_host_are_compared_by_their_names() -> None:
    assert "weights" not in verdicts(engine(), engine())
    row = next(f for f in diagnose(engine(), engine()).findings if f.what == "weights")
    assert "not on this host" in row.why
    assert verdicts(engine(), engine(model="Qwen3-8B", quantization="fp8"))["weights"] == "no"
    other = diagnose(engine(), engine(model="Qwen/Qwen3-8B")).findings
    assert [f.verdict for f in other if f.what == "weights"] == ["look"]


def test_latent_attention_on_a_cpu_is_found() -> None:
    cpu = EngineArguments.of_command("VLLM_CPU_KVCACHE_SPACE=4 vllm serve DeepSeek-V3")
    assert cpu.device == "cpu"
    gpu = EngineArguments.of_command("vllm serve DeepSeek-V3")
    assert verdicts(cpu, gpu)["MLA"] == "no"
    assert "MLA" not in verdicts(gpu, gpu)
    plain = EngineArguments.of_command("VLLM_CPU_KVCACHE_SPACE=4 vllm serve Llama-3.1-8B")
    assert "MLA" not in verdicts(plain, plain)


def test_an_engine_on_a_cpu_uses_the_attention_backend_of_a_cpu() -> None:
    command = "VLLM_CPU_KVCACHE_SPACE=4 vllm serve Llama-3.1-8B"
    plain, cpu = (EngineArguments.of_command(f"{command}{one}") for one in ("", " --dtype float32"))
    assert verdicts(plain, plain)["backend"] == "no"  # bf16, as in the checkpoint
    assert "backend" not in verdicts(cpu, cpu)
    rows = {found.what: found.prefill for found in diagnose(cpu, cpu).findings}
    assert (rows["backend"], rows["layout"], rows["block"]) == ("CPU_ATTN", "LBHNC", "128 tokens")


def test_an_installed_vllm_for_cpus_starts_no_engine_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def installed(package: str) -> str:
        if package == "vllm-cpu":
            return "0.32.0"
        raise PackageNotFoundError(package)

    monkeypatch.setattr("kvatlas.engines.vllm.doctor.version", installed)
    gpu = EngineArguments.of_command("vllm serve Llama-3.1-8B")
    cpu = EngineArguments.of_command(
        "VLLM_CPU_KVCACHE_SPACE=4 vllm serve Llama-3.1-8B --dtype float32"
    )
    assert verdicts(gpu, gpu)["installed vLLM"] == "look"
    assert "installed vLLM" not in verdicts(cpu, cpu)


def test_engines_from_files(tmp_path: Path) -> None:
    flag = json.dumps(FLAG | {"kv_connector_extra_config": {"transport": "shm"}})
    line = f"""# prefill
    VLLM_KV_CACHE_LAYOUT=HND CUDA_VISIBLE_DEVICES=0 vllm serve Qwen3-8B -tp 2 --port 8100 \\
      --no-enable-prefix-caching --trust-remote-code --max-model-len 16K \\
      --kv-transfer-config '{flag}'
    """
    (tmp_path / "prefill.sh").write_text(line)
    arguments = {"model": "Qwen3-8B", "tp": 1, "kv_transfer_config": flag, "seed": 3}
    (tmp_path / "decode.json").write_text(json.dumps(arguments))
    shown("plan", "Qwen3-8B", "--save", str(tmp_path / "plan.json"))
    answer = said("doctor", *(str(tmp_path / name) for name in ("prefill.sh", "decode.json")))
    rows = {row["what"]: (row["prefill"], row["decode"]) for row in answer["findings"]}
    assert rows["layout"] == ("LBHNC", "LBNHC")
    assert rows["ranks"] == ("tp 2, pp 1", "tp 1, pp 1")
    assert rows["longest request"][0] == "16,384 tokens"
    out = shown(
        "doctor", str(tmp_path / "prefill.sh"), str(tmp_path / "plan.json"), "--tokens", "9"
    )
    assert out.splitlines()[-1].startswith("These engines can exchange caches")


def test_command_lines_of_the_guide_can_exchange_caches(tmp_path: Path) -> None:
    """Each pair of files in the guide is one that doctor reads, and finds nothing against."""
    page = (Path(__file__).parents[2] / "docs/how-to/vllm.md").read_text()
    pattern = r'^```sh title="(prefill|decode)\.sh"\n(.*?)^```'
    files = re.findall(pattern, page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["prefill", "decode"] * 2, "one host, and two"
    (tmp_path / "secret").write_text("x" * 32)
    for number in (0, 2):
        ends = [
            EngineArguments.of_command(
                text.replace("/run/secrets/kvatlas", str(tmp_path / "secret"))
            )
            for _, text in files[number : number + 2]
        ]
        found = diagnose(*ends)
        assert found.ok, found.answer
        assert found.connector_checked
        # The addresses of two hosts are not both of the host that runs this test.
        assert {f.what for f in found.findings if f.verdict != "ok"} <= {"transport"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Qwen3-8B", "--from", "blok-size=3"), "Did you mean block_size"),
        (("no-such-model",), "unknown_model"),
        (("Qwen3-8B", "--from", "tp=two"), "bad_config"),
        (("Qwen3-8B", "--to", "whatever"), "name=value"),
        (("no", "files"), "unreadable"),
        (("a", "b", "--from", "tp=1"), "pass a model"),
        (("Qwen3-8B", "--tokens", "0"), "bad_size"),
    ],
)
def test_what_cannot_be_read_is_refused(arguments: tuple[str, ...], words: str) -> None:
    result = kvatlas("doctor", *arguments)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())


def test_files_that_are_no_engines(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    for text in (
        "",
        "[1]",
        "vllm serve 'Qwen3-8B",
        "vllm serve Qwen3-8B -tp none",
        "vllm serve Qwen3-8B --kv-transfer-config {",
        '{"model": 3}',
        '{"regions": 1}',
        "\x00",
    ):
        path.write_text(text)
        result = kvatlas("doctor", str(path), str(path))
        assert result.exit_code == 2, (text, result.output)
        assert "Traceback" not in result.output


def test_doctor_connects_to_a_rank_that_is_running(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    ours.write_bytes(b"the secret of this fleet")
    other.write_bytes(b"the secret of another fleet")
    rank = Rank(small("dense"), "tcp", 1, 50, secret=ours.read_bytes())
    listening = socket.create_server(("127.0.0.1", 0))
    try:
        peer = rank.node.endpoint
        for secret, verdict, reason in (
            (ours, "ok", "encrypted and authenticated"),
            (other, "no", "do not share the same secret"),
            (None, "no", ""),
        ):
            extra = {} if secret is None else {"secret_file": str(secret)}
            found = diagnose(engine(extra), engine(extra), peer=peer)
            (seen,) = [one for one in found.findings if one.what == "peer"]
            assert (seen.verdict, seen.prefill) == (verdict, "127.0.0.1"), seen
            assert reason in seen.why
            assert found.ok == (verdict == "ok")
        nobody = f"127.0.0.1:{listening.getsockname()[1]}"
        listening.close()
        refused = diagnose(engine(), engine(), peer=nobody)
        assert "not reached: Connection refused" in refused.answer
    finally:
        rank.close()
        listening.close()
    assert "needs an engine with a kv_transfer_config" in kvatlas(
        "doctor", "Qwen3-8B", "--peer", "127.0.0.1:1"
    ).output.replace("\n", " ")
