# Sourced by ./quickstart and ./check: a private virtual environment with tox in it. Sets $tox.
# A Python marked "externally managed" refuses a plain pip install, so nothing is installed into it.

tox=.venv/bin/tox
if [ ! -x "$tox" ] || ! "$tox" --version >/dev/null 2>&1; then
    python=
    for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "Python 3.10 or newer is needed (3.11 for the full run). Set PYTHON to one." >&2
        exit 1
    fi
    echo "Setting up .venv with $("$python" --version)" >&2
    rm -rf .venv
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "$python cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv" >&2
        exit 1
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check 'tox>=4.23'
fi
