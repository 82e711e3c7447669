#!/bin/sh
# Gives a CUDA toolkit that was put together from packages the names that a linker looks for.
#
#     link.sh CUDA_HOME
#
# Packages hold libcublas.so.13, a linker asks for libcublas.so. The driver's library, libcuda.so.1, comes with the driver,
# which a machine that only builds does not have: a stand-in with its names and no code is linked against instead.
set -eu
lib="$1/lib"
mkdir -p "$lib/stubs"
for name in cudart cublas cublasLt curand nvrtc; do
    set -- "$lib/lib$name".so.*
    ln -sf "../$(basename "$1")" "$lib/stubs/lib$name.so"
done
grep -ohE '\bcu[A-Z][A-Za-z0-9_]*' "$lib/../include/cuda.h" | sort -u | sed 's/.*/void &(void) {}/' |
    cc -shared -Wl,-soname,libcuda.so.1 -x c - -o "$lib/stubs/libcuda.so"
