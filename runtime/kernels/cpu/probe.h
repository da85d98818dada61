#pragma once
#include "kernels.h"

// True if these kernels run here and agree with `reference`. A processor may advertise instructions that
// fault (e.g. if a virtual machine masks them), so they are tried in a child process. Also true if no
// child process can be started.
bool runs_here(const Kernels& tried, const Kernels& reference);
// Likewise, whether those of types with grids agree with the values of these.
bool grids_run_here(const Kernels& tried);
