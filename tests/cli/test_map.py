"""`kvatlas map`: files, what goes to a terminal, and refusals."""

from __future__ import annotations

from pathlib import Path

from tests.cli.helpers import kvatlas, shown
from tests.page.large_plan import large_plan


def test_a_model_is_drawn_to_a_file(tmp_path: Path) -> None:
    page = tmp_path / "map.html"
    text = shown("map", "Qwen3-8B", "--memory", "8GiB", "--max-len", "4K", "-o", str(page))
    assert text.startswith("Wrote ")
    again = shown("map", "Qwen3-8B", "-o", str(page))
    assert again.startswith("Replaced "), "a file that was there is mentioned"
    content = page.read_text()
    assert content.startswith("<!doctype html>")
    assert all(f'"order":"{order}"' in content for order in ("LBNHC", "BHLNC", "LHBNC"))


def test_a_route_between_two_files_or_two_ends(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    shown("plan", "Qwen3-8B", "--tp", "2", "--save", files[0])
    shown("plan", "Qwen3-8B", "--layout", "BHLNC", "--save", files[1])
    page = tmp_path / "map.html"
    shown("map", files[0], "--to", files[1], "-o", str(page))
    assert '"src_rank":1' in page.read_text()
    shown("map", "Qwen3-8B", "--from", "tp=2", "--to", "tp=1,layout=BHLNC", "-o", str(page))
    assert '"src_rank":1' in page.read_text()


def test_pictures_and_text_go_to_the_terminal() -> None:
    assert shown("map", "gpt-oss-20b", "--svg").startswith("<svg")
    assert "sliding_window" in shown("map", "gpt-oss-20b", "--text")


def test_a_plan_of_a_million_blocks_and_ten_thousand_layers_is_drawn(tmp_path: Path) -> None:
    saved = tmp_path / "large.json"
    saved.write_bytes(large_plan("BLNHC").to_json())
    assert "Wrote" in shown("map", str(saved), "-o", str(tmp_path / "map.html"))
    assert "B 1,000,000 blocks > L 10,000 layers" in shown("map", str(saved), "--text")


def test_refusals_are_short_and_coded(tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    shown("plan", "Qwen3-8B", "--save", str(good))
    text = good.read_text()
    damaged = {"cut.json": text[:3000], "wrong.json": text.replace('"page_stride":', '"x":')}
    layer = text[text.index('{"name":') : text.index("}}") + 2]
    damaged["layers.json"] = text.replace(layer, ",".join([layer] * 17_000), 1)
    for name, content in damaged.items():
        (tmp_path / name).write_text(content)
    cases = [
        ("unreadable", str(tmp_path / "cut.json")),
        ("bad_plan", str(tmp_path / "wrong.json")),
        ("bad_plan", str(tmp_path / "layers.json")),
        ("unwritable", "Qwen3-8B", "-o", str(tmp_path / "no" / "map.html")),
        ("unwritable", "Qwen3-8B", "--svg", "-o", "/dev/full"),
        ("unreadable", str(good), "--to", str(tmp_path / "missing.json")),
        ("bad_plan", str(good), "--to", str(tmp_path / "cut.json")),
        ("unknown_model", "no-such-model"),
        ("", str(good), "--tp", "2"),
        ("", "Qwen3-8B", "--svg", "--text"),
        ("", str(good), "--to", "tp=2"),
    ]
    for code, *args in cases:
        result = kvatlas("map", *args)
        assert result.exit_code == 2, (args, result.output)
        assert f"code: {code}" in result.stderr if code else "Invalid value" in result.stderr
        assert "Traceback" not in result.stderr
        named = [name for name in damaged if name in args[-1]]
        assert all(name in result.stderr for name in named), "which of the files is damaged?"
