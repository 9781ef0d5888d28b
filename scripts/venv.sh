# Sourced by the other scripts: makes .venv complete, at once when it is, and leaves `root` and `python` set.
#
# .venv/.installing exists while packages are being installed: when it is found, a run was interrupted and .venv is made anew.
# .venv/.complete holds the hash of what was installed for; it is written last.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
TORCH=torch==2.13.0
LANGUAGES=(tilelang==0.1.15)
TRITON=triton==3.6.0

_fail() { printf 'kvhal: error: %s\n' "$1" >&2; exit 1; }

_hash() { "$1" - "$root/pyproject.toml" "$root/scripts/venv.sh" <<'PY'
import hashlib, sys
print(hashlib.sha256(b"".join(open(name, "rb").read() for name in sys.argv[1:])).hexdigest())
PY
}

_find_python() {
    local name
    for name in "${PYTHON:-python3}" python3.11 python3.12 python3.13; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$name"
            return
        fi
    done
    _fail "no Python 3.11 or newer found; name one with PYTHON=/path/to/python"
}

# Without --no-compile pip compiles thousands of files that nothing ever imports; -qq keeps warnings about its own set-up out.
_pip() { "$python" -m pip install -qq --no-compile --disable-pip-version-check "$@"; }

_has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

_create() {
    local base
    base=$(_find_python)
    rm -rf "$root/.venv"
    mkdir "$root/.venv"
    touch "$root/.venv/.installing"
    "$base" -m venv "$root/.venv" || _fail "$base -m venv failed; on Debian it needs the package python3-venv"
}

_install() {
    touch "$root/.venv/.installing"
    rm -f "$root/.venv/.complete"
    # torch first and pinned wherever it could be resolved again: a machine without a GPU may offer a build of its own.
    printf 'kvhal: installing torch into .venv (minutes on the first run)\n' >&2
    _pip "$TORCH"
    # A CUDA build of torch brings the triton that it was made for; that one stays.
    _has triton || LANGUAGES+=("$TRITON")
    printf 'kvhal: installing the kernel languages, kvhal and its test tools\n' >&2
    (cd "$root" && _pip "$TORCH" "${LANGUAGES[@]}" -e '.[test]')
    rm "$root/.venv/.installing"
    printf '%s\n' "$1" >"$root/.venv/.complete"
}

_make_venv() {
    local wanted=none
    if [ -x "$python" ] && [ ! -e "$root/.venv/.installing" ]; then
        wanted=$(_hash "$python")
        [ "$(cat "$root/.venv/.complete" 2>/dev/null)" != "$wanted" ] || return 0
    fi
    if [ -e "$root/.venv/.installing" ] || ! "$python" -m pip --version >/dev/null 2>&1; then
        _create
        wanted=$(_hash "$python")
    fi
    _install "$wanted"
}

# Two scripts at once must not install into one folder.
if command -v flock >/dev/null; then
    exec 9<"$root/scripts/venv.sh"
    flock 9
fi
_make_venv
exec 9<&-
