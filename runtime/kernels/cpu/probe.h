#pragma once
#include "kernels.h"

// Whether these kernels run here and agree with `reference`: a processor may advertise instructions
// that fault (a virtual machine that masks them), so they are tried in a child process. True where
// no child can be made: then what the processor says is all there is.
bool runs_here(const Kernels& tried, const Kernels& reference);
