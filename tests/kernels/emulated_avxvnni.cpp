// Compares the kernels of the level avxvnni, on emulated instructions, with those of the generic level, as the library
// does when it is loaded. Exits with 0 if they agree. With an argument the instructions make an error.
#include "emulated_avxvnni.h"

#include "../../runtime/kernels/cpu/probe.h"

int main(int argc, char**) {
    emulated_error = argc > 1;
    return !runs_here(kernels_avxvnni, kernels_generic);
}
