#!/usr/bin/env bash
# Builds llama.cpp from source into a virtual environment: build.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2
here=$(cd "$(dirname "$0")" && pwd)
source=$venv/source
pin=$(grep '^llama-cpp-python==' "$here/requirements.txt")

"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install -r <(grep -v '^llama-cpp-python' "$here/requirements.txt") scikit-build-core
rm -rf "$source" && mkdir -p "$source"
pip download --no-deps --no-build-isolation --no-binary llama-cpp-python -d "$source" "$pin"
tar xzf "$source"/llama_cpp_python-*.tar.gz -C "$source" --strip-components=1
"$here/mend.sh" "$source"
pip install "$source"
rm -rf "$source"
