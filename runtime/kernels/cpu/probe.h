#pragma once
#include "kernels.h"

// True if these kernels run here and agree with `reference`: a processor may advertise instructions that
// fault (a virtual machine that masks them), so they are tried in a child process. True if no child can
// be made: then there is only the processor's word.
bool runs_here(const Kernels& tried, const Kernels& reference);
