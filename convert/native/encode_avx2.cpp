#include <immintrin.h>

#include "encode.h"

namespace {
#include "encode_f16c.h"
#include "encode_template.h"
}  // namespace

const Encoders encoders_avx2 = ENCODERS;
