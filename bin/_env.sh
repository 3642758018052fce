# Sourced by the scripts beside it; runs in any POSIX shell. They find it with `readlink -f`, which
# macOS has since 12.3, so a link to a script works too.
#
# `environment [EXTRA]` makes .venv on first use, installs this checkout into it (again when
# pyproject.toml or constraints.txt change), and sets $VENV. PYTHON=... chooses the interpreter.
# `environment pytest` installs of the extra `test` only what every test needs.

set -eu
ROOT=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd -P)
VENV=$ROOT/.venv

usable() {
    "$1" -c 'import platform, sys
sys.exit(sys.version_info < (3, 11) or (sys.platform == "darwin" and platform.machine() != "arm64"))
' >/dev/null 2>&1
}

find_python() {
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3 python3.14}; do
        if usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "mlxcache needs Python 3.11 or newer (on a Mac: one for Apple silicon)." >&2
    echo "Install it, for example with 'brew install python' or 'apt install python3-venv'," >&2
    echo "or say where it is: PYTHON=/path/to/python3 $0" >&2
    return 1
}

interrupted() {
    trap - INT
    echo "Interrupted. Start it again to continue." >&2
    exit 130
}

# Run a command of the installation; some shells run the trap first, others see the status first.
step() {
    "$@" || {
        status=$?
        [ "$status" -ne 130 ] || interrupted
        exit "$status"
    }
}

environment() {
    extra=${1:-}
    wanted=$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)
    stamp=$VENV/.installed${extra:+-$extra}
    # Without an extra, any stamp will do: each extra brings all that the server needs.
    set -- "$stamp"*
    [ "$extra" != pytest ] || set -- "$@" "$VENV/.installed-test"
    if [ -x "$VENV/bin/python" ] && grep -qsxF "$wanted" "$@"; then
        return
    fi
    trap interrupted INT
    if ! usable "$VENV/bin/python" || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        echo "Making $VENV with $("$python" --version), once ..." >&2
        # With the default action, Ctrl-C ends Python without a traceback.
        step "$python" -c 'import runpy, signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
runpy.run_module("venv", run_name="__main__", alter_sys=True)
' --clear "$VENV"
    fi
    echo "Installing what mlxcache${extra:+[$extra]} needs, once: from one to ten minutes ..." >&2
    case $extra in
    "") set -- "$ROOT" ;;
    pytest) set -- "$ROOT" pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis pillow ;;
    *) set -- "$ROOT[$extra]" ;;
    esac
    step "$VENV/bin/python" "$ROOT/bin/_install.py" \
        --constraint "$ROOT/constraints.txt" --editable "$@"
    if [ "$extra" = test ]; then # its dependencies are packages that mlxcache does not use
        step "$VENV/bin/python" "$ROOT/bin/_install.py" \
            --constraint "$ROOT/constraints.txt" --no-deps mlx-vlm
    fi
    echo "$wanted" >"$stamp"
    trap - INT
    echo "Installed." >&2
}

# MLX's Linux wheels bring the reference BLAS; OpenBLAS, where installed, is many times faster.
# And they take memory from malloc: in huge pages, the first touch of a session's KV costs half.
fast_linux() {
    [ "$(uname -s)" = Linux ] || return 0
    export GLIBC_TUNABLES="${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.hugetlb=1"
    for folder in "/usr/lib/$(uname -m)-linux-gnu" /usr/lib64 /usr/lib; do
        if [ -e "$folder/libopenblas.so.0" ]; then
            LD_PRELOAD=$folder/libopenblas.so.0${LD_PRELOAD:+:$LD_PRELOAD}
            export LD_PRELOAD
            return 0
        fi
    done
}
