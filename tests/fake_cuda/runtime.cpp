// All of the fake CUDA runtime as one unit, which compiles in half the time.

#include "graphs.cpp"
#include "memory.cpp"
#include "queue.cpp"
#include "streams.cpp"
