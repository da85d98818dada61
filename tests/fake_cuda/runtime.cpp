// The whole fake CUDA runtime as one translation unit.

#include "flags.cpp"
#include "graphs.cpp"
#include "memory.cpp"
#include "queue.cpp"
#include "streams.cpp"
