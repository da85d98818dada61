#!/usr/bin/env bash
# Makes a machine without a network ready for the GPU checks: installs the wheels of
# `make gpu-wheels`, and hotsplit built there, into the folder SITE for PYTHONPATH.
#
#     benchmarks/gpu_setup.sh PYTHON WHEELS SITE [--without-device]
# PYTHON has torch and Triton, and nothing is installed over its packages, not even another torch. No
# virtual environment is used: one made by a Python that is itself in one does not see its packages.
set -euo pipefail
python=$1 wheels=$2 site=$3 options=("${@:4}")
here=$(cd "$(dirname "$0")" && pwd)
refuse() { echo "gpu_setup: $1" >&2; exit 1; }

command -v "$python" > /dev/null || refuse "no $python here; name the Python that has torch: PYTHON=..."
"$python" "$here/gpu_ready.py" --packages torch,triton,numpy,pytest,transformers "${options[@]}"
for wheel in gguf pulp highspy scikit_build_core; do
  if ! "$python" -c "import $wheel" 2> /dev/null && ! compgen -G "$wheels/$wheel-*.whl" > /dev/null; then
    refuse "no wheel of $wheel in $wheels; run make gpu-wheels where there is a network and copy the folder here"
  fi
done
command -v c++ > /dev/null || refuse "no C++ compiler (c++) here; install one"

began=$SECONDS
mkdir -p "$site" && site=$(cd "$site" && pwd)  # a build runs elsewhere
# Tools that came with a Python in a virtual environment, such as cmake and ninja, are beside it.
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"
export PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
install=("$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site")
if [ ! -e "$site/ready" ]; then
  for wheel in "$wheels"/*.whl; do
    if [ -e "$wheel" ]; then "${install[@]}" "$wheel" || refuse "$wheel does not fit this Python; run make gpu-wheels PYTHON_VERSION=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"; fi
  done
  touch "$site/ready"
fi
PYTHONPATH=$site "${install[@]}" --no-build-isolation "$here/.." || refuse "hotsplit was not built; the reason is above"
PYTHONPATH="$site" "$python" "$here/gpu_ready.py" --packages gguf,pulp,highspy,hotsplit --needs-kernels "${options[@]}"
echo "gpu_setup: ready in $((SECONDS - began)) s: PYTHONPATH=$site $python"
