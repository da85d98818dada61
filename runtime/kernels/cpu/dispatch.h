// The interface of dispatch.cpp for the other sources of this library.
#pragma once
#include "kernels.h"
#include "thread_pool.h"

// The kernels of the level in use.
const Kernels& kernels();

// Bytes of a packed vector at any level that this processor may have.
int64_t packed_room(int64_t D);
