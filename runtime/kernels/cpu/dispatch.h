// The interface of dispatch.cpp for the other sources of this library.
#pragma once
#include "kernels.h"
#include "thread_pool.h"

// The kernels of the level in use.
const Kernels& kernels();
