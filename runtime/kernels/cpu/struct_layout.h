// The layout of structs that Python mirrors, for tests/test_structs.py, which compares it with the
// mirrors: a field that one side lacks or has in another place would be read as another one.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct StructField {
    const char* in;    // the struct's name; null ends the list
    const char* name;  // null: the struct itself
    int64_t offset, num_bytes;
};

#define STRUCT(S) {#S, nullptr, 0, sizeof(S)}
#define FIELD(S, name) {#S, #name, offsetof(S, name), sizeof(S::name)}

extern "C" {
// All structs of the library, each with its fields in order.
const StructField* hs_struct_fields();
}
