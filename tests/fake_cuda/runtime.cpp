// All of the fake CUDA runtime as one unit.

#include "graphs.cpp"
#include "memory.cpp"
#include "queue.cpp"
#include "streams.cpp"
