// Several tokens through a block of neurons, each token only through those that fire for it: what a
// prompt takes of a sparse layer on the CPU. native_pass.py mirrors the struct; the reference is
// feed_forward.py.
//
// Letters: T tokens, D model width, N neurons of the block.
#pragma once
#include "step.h"

struct SparkPass {
    SparkBlock block;
    // [D / PASS_CHUNK rounded up][T][PASS_CHUNK], zeros behind D, 64-aligned
    const float* x;
    // [T, N] what the gates gave, biases included, and of SiLU and GELU the activation;
    // overwritten. Null: gates are computed for the pairs that `named` names.
    float* gate;
    const uint8_t* named;  // [T, N] 0 or 1
    float* y;              // laid out as x, added to
    uint8_t* workspace;    // spark_pass_bytes(), 64-aligned
    int64_t width, num_tokens;
    int64_t gate_stride, named_stride;  // values from token to token
    int64_t most;       // pairs of a token and a neuron; of more, nothing is computed
    int64_t num_pairs;  // that fire, or are named; written
    int64_t num_named, num_open;  // neurons that any token names, that fire for any; written
    int32_t activation;
    float threshold;
    int32_t num_workers, unused;  // written by spark_pass_bytes
};

extern "C" {
// The bytes of workspace it needs, or -1 where sizes, kinds or pointers do not fit together.
int64_t spark_pass_bytes(SparkPass* pass);
// y += what the neurons give for each token. Reads each weight that any token needs once, moves
// those of gate and up to f32 in pieces that the second cache holds. The same bits for any number
// of threads. Where num_pairs comes to more than `most`, y and gate are as they were.
void spark_pass(SparkPass* pass);
}
