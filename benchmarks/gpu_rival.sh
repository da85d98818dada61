#!/usr/bin/env bash
# Builds llama.cpp for CUDA as a Python package, on a machine without a network.
#
#     benchmarks/gpu_rival.sh PYTHON SOURCE FOLDER
#
# SOURCE is made by `make gpu-rival-source`, where there is a network. FOLDER then holds the package
# llama_cpp and its libraries, as `benchmarks/gpu.py --rival` expects. It builds for one architecture
# (ARCHITECTURE, 90 by default), because each further one takes as long again. Flash attention's
# kernels are half of the build: FLASH=OFF leaves them out; CUDA=OFF builds for the CPU only. It stops
# after MINUTES, 9 by default; what was compiled by then stays, and the next call continues from there.
set -euo pipefail
python=$1 source=$2 folder=$3 minutes=${MINUTES:-9}
refuse() { echo "gpu_rival: $1" >&2; exit 1; }
[ -e "$source/CMakeLists.txt" ] || refuse "no llama.cpp in $source; run make gpu-rival-source where there is a network and copy the folder here"
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):/usr/local/cuda/bin:$PATH"
command -v nvcc > /dev/null || refuse "no nvcc on the PATH; it comes with the CUDA toolkit"
mkdir -p "$folder/llama_cpp/lib"
folder=$(cd "$folder" && pwd) began=$SECONDS
libraries=$folder/llama_cpp/lib packaged=""

# If the toolkit is only the compiler, cuBLAS comes from torch's packages:
# nvidia/cu13/{include,lib}, or nvidia/cublas/{include,lib} before CUDA 13. Their libraries lack the
# name that a linker looks for.
cuda=$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ _HERE_=//p' | xargs dirname)
if [ "${CUDA:-ON}" = ON ] && ! compgen -G "$cuda/lib*/libcublas.so" > /dev/null && ! compgen -G "$cuda/targets/*/lib/libcublas.so" > /dev/null; then
  packaged=$("$python" -c 'import glob, nvidia
print(*[f for p in nvidia.__path__ for f in glob.glob(p + "/*/lib/libcublas.so.*")][:1])' 2> /dev/null) || packaged=""
  [ -n "$packaged" ] || refuse "no cuBLAS in $cuda, nor among the packages of $python; install the CUDA toolkit"
  packaged=$(dirname "$packaged")
  for file in "$packaged"/libcublas*.so.*; do
    ln -sf "$file" "$libraries/$(basename "$file")"
    ln -sf "$file" "$libraries/$(basename "${file%%.so.*}.so")"
  done
  export CMAKE_LIBRARY_PATH="$libraries" CPATH="$(dirname "$packaged")/include"
fi

# Without the driver's stub library, llama.cpp's virtual memory pool does not link; its other pool
# needs none.
options=()
if ! compgen -G "$cuda/lib*/stubs/libcuda.so" > /dev/null && ! compgen -G "$cuda/targets/*/lib/stubs/libcuda.so" > /dev/null; then
  options=(-DGGML_CUDA_NO_VMM=ON)
fi

build=$folder/build
log=$folder/build.log
configure=(cmake -S "$source" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release
  -DGGML_CUDA="${CUDA:-ON}" -DCMAKE_CUDA_ARCHITECTURES="${ARCHITECTURE:-90}"
  -DGGML_CUDA_FA="${FLASH:-ON}" -DGGML_CUDA_NCCL=OFF -DLLAVA_BUILD=OFF -DSKBUILD_PLATLIB_DIR="$folder"
  "${options[@]}")
if ! { "${configure[@]}" && timeout "${minutes}m" ninja -C "$build" llama; } > "$log" 2>&1; then
  reason=$(grep -iE 'error|fatal' "$log" | head -1 || true)
  refuse "not built in $((SECONDS - began)) s (at most $minutes min): ${reason:-$(tail -1 "$log")} (see $log)"
fi
find "$build" \( -name 'libllama.so*' -o -name 'libggml*.so*' \) -exec cp -P {} "$libraries/" \;
# The CUDA libraries that they need, in case the system's loader does not find them.
for name in $(ldd "$libraries"/lib*.so | awk '/not found/ { print $1 }' | sort -u); do
  found=$(find -L "$cuda" ${packaged:+"$packaged"} -name "$name" 2> /dev/null | head -1)
  if [ -n "$found" ]; then ln -sf "$found" "$libraries/$name"; fi
done
cp -r "$source/llama_cpp/." "$folder/llama_cpp/"
"$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$folder" "$source"/*.whl
PYTHONPATH="$folder" "$python" -c 'import llama_cpp, os
assert llama_cpp.llama_supports_gpu_offload() or os.environ.get("CUDA") == "OFF"' \
  || refuse "the built package does not load, or has no GPU support (see $log)"
echo "gpu_rival: built in $((SECONDS - began)) s: --rival $folder"
