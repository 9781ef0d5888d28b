"""Configuration: what is accepted, what each mistake is told, and that shipped files load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvhal
from kvhal import ConfigError, Op
from kvhal.config import current, current_policy, file_layer, make_layer, merge
from kvhal.dispatcher import Policy

ROOT = Path(__file__).resolve().parents[2]
KNOWN = "needs one of cuda_tilelang, ascend_tilelang, portable_triton, reference_torch"
SHIPPED = sorted(ROOT.glob("configs/*.toml"))


def test_the_default_policy_asks_for_nothing() -> None:
    assert current_policy() == Policy()


def test_there_are_shipped_files() -> None:
    assert {path.stem for path in SHIPPED} >= {"auto", "h100", "ascend", "triton", "reference"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_load(path: Path) -> None:
    kvhal.configure(path=path)
    policy = current_policy()
    if path.stem == "auto":
        assert policy == Policy()
    if path.stem in ("reference", "triton"):
        assert {name for _, name, _ in policy.forced} == {
            {"reference": "reference_torch", "triton": "portable_triton"}[path.stem]
        }
    if path.stem in ("h100", "ascend"):
        assert policy.preference and policy.preference[0] == {"h100": "cuda_tilelang", "ascend": "ascend_tilelang"}[path.stem]


def test_every_setting_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    path.write_text(
        'strict = true\n[backends]\npreference = ["portable_triton", "reference_torch"]\nforce = "reference_torch"\n'
        '[backends.ops]\nstore_kv_cache = "portable_triton"\n[ascend]\nsimulate = true\n'
    )
    policy = merge([file_layer(path, "a test")])
    assert (policy.strict, policy.simulate) == (True, True)
    assert policy.preference == ("portable_triton", "reference_torch")
    assert policy.forced_for(Op.STORE) == ("portable_triton", str(path))
    assert policy.forced_for(Op.LOAD) == ("reference_torch", str(path))


BAD_FILES = {
    "unknown-key": ("strictt = true", "strictt: unknown key; known here: strict, backends, ascend"),
    "unknown-backends-key": (
        '[backends]\nprefer = ["reference_torch"]',
        "backends.prefer: unknown key; known here: preference, force, ops",
    ),
    "unknown-ascend-key": ("[ascend]\nsimulator = true", "ascend.simulator: unknown key; known here: simulate"),
    "unknown-section": ("[cuda]\narch = 90", "cuda: unknown key; known here: strict, backends, ascend"),
    "unknown-backend": ('[backends]\nforce = "triton"', f"backend has 'triton', {KNOWN}"),
    "unknown-preferred": ('[backends]\npreference = ["cuda"]', f"backend has 'cuda', {KNOWN}"),
    "unknown-op": ('[backends.ops]\nstore = "reference_torch"', "operation has 'store', needs one of store_kv_cache"),
    "unknown-op-backend": ('[backends.ops]\nstore_kv_cache = "torch"', f"backend has 'torch', {KNOWN}"),
    "no-preference": ("[backends]\npreference = []", "preference has [], needs at least one backend, each once"),
    "twice": (
        '[backends]\npreference = ["reference_torch", "reference_torch"]',
        "preference has ['reference_torch', 'reference_torch'], needs at least one backend, each once",
    ),
    "strict-type": ('strict = "yes"', "strict: has 'yes'"),
    "strict-number": ("strict = 1", "strict: has 1"),
    "force-type": ("[backends]\nforce = 3", "backends.force: has 3"),
    "preference-type": ('[backends]\npreference = "reference_torch"', "backends.preference: has 'reference_torch'"),
    "not-toml": ("strict = yes", "not a TOML file"),
}


@pytest.mark.parametrize("what", BAD_FILES)
@pytest.mark.parametrize("by", ["configure", "environment"])
def test_bad_files(what: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, message = BAD_FILES[what]
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        if by == "configure":
            kvhal.configure(path=path)
        else:
            monkeypatch.setenv("KVHAL_CONFIG", str(path))
            current_policy()
    assert str(raised.value).startswith(str(path)), "the text names the file"
    assert message in str(raised.value)


def test_several_mistakes_are_all_told(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('strictt = true\n[backends]\nforced = "x"\n')
    with pytest.raises(ConfigError, match=r"strictt: unknown key.*; backends\.forced: unknown key|backends\.forced.*strictt"):
        kvhal.configure(path=path)


def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"configure: cannot read .*none\.toml: No such file or directory"):
        kvhal.configure(path=path)
    monkeypatch.setenv("KVHAL_CONFIG", str(path))
    with pytest.raises(ConfigError, match=r"KVHAL_CONFIG: cannot read .*none\.toml: No such file or directory"):
        current_policy()


@pytest.mark.parametrize(("name", "content"), [("latin.toml", "# café".encode("latin-1")), ("a\0b", None)])
def test_what_cannot_be_read_is_named(name: str, content: bytes | None, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
        monkeypatch.setenv("KVHAL_CONFIG", str(path))
        with pytest.raises(ConfigError, match=r"KVHAL_CONFIG: cannot read .*latin\.toml: 'utf-8' codec can't decode byte 0xe9"):
            current_policy()
    with pytest.raises(ConfigError, match=r"configure: cannot read .*: ('utf-8' codec|embedded null)"):
        kvhal.configure(path=path)


def test_one_value_may_stand_for_several() -> None:
    kvhal.configure(preference="reference_torch")
    with kvhal.use_backend("portable_triton", ops="store_kv_cache"):
        assert current_policy().forced == ((Op.STORE, "portable_triton", "use_backend"),)
    assert current_policy() == Policy(preference=("reference_torch",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ops": "store_kv_cache"}, "configure: ops has 'store_kv_cache', needs a mapping of operations to backends"),
        ({"ops": ["store_kv_cache"]}, r"configure: ops has \['store_kv_cache'\], needs a mapping"),
        ({"backend": ["x"]}, rf"configure: backend has \['x'\], {KNOWN}"),
        ({"preference": 3}, f"configure: backend has 3, {KNOWN}"),
        ({"preference": [["x"]]}, rf"configure: backend has \['x'\], {KNOWN}"),
    ],
)
def test_values_of_another_kind(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kvhal.configure(**arguments)


def test_a_bad_configure_changes_nothing(tmp_path: Path) -> None:
    kvhal.configure(backend="reference_torch", strict=True)
    before = current_policy()
    for arguments in (
        {"backend": "none"},
        {"path": tmp_path / "none.toml"},
        {"ops": {"x": "reference_torch"}},
        {"preference": []},
    ):
        with pytest.raises(ConfigError):
            kvhal.configure(**arguments)  # type: ignore[arg-type]
    assert current_policy() == before


@pytest.mark.parametrize("flag", [1, 0, "no", []])
def test_flags_are_true_or_false(flag: Any) -> None:
    with pytest.raises(ConfigError, match=r"configure: strict has .*, needs True or False"):
        kvhal.configure(strict=flag)
    with (
        pytest.raises(ConfigError, match=r"simulate has .*, needs True or False"),
        kvhal.use_backend("reference_torch", None, flag),
    ):
        pass


def test_a_bad_environment_is_told_on_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHAL_BACKEND", "cuda")
    with pytest.raises(ConfigError, match=rf"KVHAL_BACKEND: backend has 'cuda', {KNOWN}"):
        current_policy()
    monkeypatch.setenv("KVHAL_BACKEND", "reference_torch")
    monkeypatch.setenv("KVHAL_STRICT", "yes")
    with pytest.raises(ConfigError, match=r"KVHAL_STRICT: has 'yes', needs 1, true, 0 or false"):
        current_policy()


def test_empty_variables_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVHAL_BACKEND", "KVHAL_STRICT", "KVHAL_CONFIG"):
        monkeypatch.setenv(name, "")
    assert current_policy() == Policy()


@pytest.mark.parametrize(("text", "strict"), [("1", True), ("true", True), ("True", True), ("0", False), ("false", False)])
def test_strict_by_environment(text: str, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHAL_STRICT", text)
    assert current_policy().strict is strict


def test_the_environment_beats_the_file_and_can_say_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "strict.toml"
    path.write_text("strict = true\n")
    monkeypatch.setenv("KVHAL_CONFIG", str(path))
    assert current_policy().strict
    monkeypatch.setenv("KVHAL_STRICT", "0")
    assert not current_policy().strict
    kvhal.configure(strict=True)
    assert current_policy().strict


def test_unknown_names_in_use_backend() -> None:
    with pytest.raises(ConfigError, match=f"use_backend: backend has 'nope', {KNOWN}"), kvhal.use_backend("nope"):
        pass
    with (
        pytest.raises(ConfigError, match="use_backend: operation has 'store', needs one of store_kv_cache"),
        kvhal.use_backend("reference_torch", ops=["store"]),
    ):
        pass
    with pytest.raises(ConfigError, match="use_backend: ops is empty"), kvhal.use_backend("reference_torch", ops=[]):
        pass
    with pytest.raises(ConfigError, match=f"use_backend: backend has 'nope', {KNOWN}"), kvhal.use_backend("nope", ops=[]):
        pass
    for name, ops, message in (("reference_torch", [["x"]], "operation"), (["x"], None, "backend"), (3, None, "backend")):
        with pytest.raises(ConfigError, match=f"use_backend: {message} has"), kvhal.use_backend(name, ops):  # type: ignore[arg-type]
            pass
    with (
        pytest.raises(ConfigError, match="simulate has True, needs False: reference_torch has no simulator"),
        kvhal.use_backend("reference_torch", simulate=True),
    ):
        pass


def test_simulation_through_a_context_reaches_nested_ones() -> None:
    with kvhal.use_backend("ascend_tilelang", simulate=True):
        assert current_policy().simulate
        with kvhal.use_backend("reference_torch", ops=["kv_index_cat"]):
            assert current_policy().simulate
    assert not current_policy().simulate


def test_the_same_configuration_is_the_same_scope() -> None:
    first = current()
    with kvhal.use_backend("reference_torch"):
        inner = current()
        assert inner is not first
    assert current() is first
    with kvhal.use_backend("reference_torch"):
        assert current() is inner
    kvhal.configure()
    assert current() is not first


def test_layers_of_higher_sources_win_as_a_whole() -> None:
    policy = merge(
        [make_layer("high", ops={"store_kv_cache": "reference_torch"}), make_layer("low", "portable_triton", strict=True)]
    )
    assert policy.forced_for(Op.STORE) == ("reference_torch", "high")
    assert policy.forced_for(Op.LOAD) == ("portable_triton", "low")
    assert policy.strict
