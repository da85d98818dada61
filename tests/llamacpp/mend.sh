#!/usr/bin/env bash
# Mends one line of llama.cpp's source in an unpacked llama-cpp-python: mend.sh SOURCE
#
# gcc 12 declares that _tile_loadconfig reads 8 of its 64 bytes, drops the stores to the others, and
# the AMX path crashes at q8_0 and q4_0 (ggml-org/llama.cpp pull request 26954). A build without AMX
# would be too slow a rival.
set -euo pipefail
amx=$1/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp
sed -i 's/^\( *\)_tile_loadconfig(&tc);/\1asm volatile("" :: "m"(tc)); _tile_loadconfig(\&tc);/' "$amx"
grep -q 'asm volatile("" :: "m"(tc)); _tile_loadconfig' "$amx" || {
  echo "$amx: the line to be mended is not there; look at it and at $0" >&2
  exit 1
}
echo "llama.cpp: mended its AMX tile configuration for gcc 12 (ggml-cpu/amx/mmq.cpp)"
