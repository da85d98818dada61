"""Child process: the CPU's levels, and the runtime's check of its C++ kernels at each."""

import os
from typing import Any

from hotsplit.doctor.children import leave_no_core, tell_at, tell_done
from hotsplit.runtime.check.cpu_kernels import KINDS, faults_of_levels, usable_levels
from hotsplit.runtime.kernels.cpu.shared_library import LEVEL_VARIABLE, open_library


def main() -> None:
    leave_no_core()
    tell_at("loading the library")
    lib = open_library()
    if lib is None:
        tell_done({"is_built": False})
        return
    tell_at("choosing a level")
    faulty, usable = lib.hs_faulty_level(), usable_levels(lib)
    found: dict[str, Any] = {
        "is_built": True,
        "level": lib.hs_level().decode(),
        "faulty": None if faulty is None else faulty.decode(),
        "usable": usable,
        "forced": os.environ.get(LEVEL_VARIABLE),
        "num_threads": int(lib.hs_num_threads()),
    }
    wrong = faults_of_levels(lib, tell_at)
    tell_done({**found, "wrong": wrong, "num_tried": len(usable) * len(KINDS)})


if __name__ == "__main__":
    main()
