#include "row_copies.h"
#include "step.h"
#include "struct_layout.h"

namespace {

// clang-format off
const StructField FIELDS[] = {
    STRUCT(HsMatrix),
    FIELD(HsMatrix, data), FIELD(HsMatrix, bias), FIELD(HsMatrix, num_rows),
    FIELD(HsMatrix, num_columns), FIELD(HsMatrix, stride), FIELD(HsMatrix, kind),
    FIELD(HsMatrix, unused),
    STRUCT(HsNorm),
    FIELD(HsNorm, weight), FIELD(HsNorm, bias), FIELD(HsNorm, epsilon), FIELD(HsNorm, unused),
    STRUCT(HsRotary),
    FIELD(HsRotary, frequency), FIELD(HsRotary, magnitude), FIELD(HsRotary, head_width),
    FIELD(HsRotary, is_adjacent), FIELD(HsRotary, unused),
    STRUCT(HsBlock),
    FIELD(HsBlock, gate), FIELD(HsBlock, up), FIELD(HsBlock, down), FIELD(HsBlock, id),
    FIELD(HsBlock, row), FIELD(HsBlock, gate_limit), FIELD(HsBlock, num_neurons),
    FIELD(HsBlock, is_by_output),
    STRUCT(HsTable),
    FIELD(HsTable, block), FIELD(HsTable, num_sequences), FIELD(HsTable, blocks_per_sequence),
    FIELD(HsTable, block_length), FIELD(HsTable, num_blocks),
    STRUCT(HsSelect),
    FIELD(HsSelect, block), FIELD(HsSelect, sinks), FIELD(HsSelect, window), FIELD(HsSelect, top),
    FIELD(HsSelect, candidates), FIELD(HsSelect, full), FIELD(HsSelect, summary),
    FIELD(HsSelect, is_coded), FIELD(HsSelect, cos), FIELD(HsSelect, sin),
    STRUCT(HsLayer),
    FIELD(HsLayer, norm), FIELD(HsLayer, num_norms), FIELD(HsLayer, query_norm),
    FIELD(HsLayer, key_norm), FIELD(HsLayer, input), FIELD(HsLayer, output),
    FIELD(HsLayer, predictor_down), FIELD(HsLayer, predictor_up), FIELD(HsLayer, down_bias),
    FIELD(HsLayer, key), FIELD(HsLayer, value), FIELD(HsLayer, summary), FIELD(HsLayer, code),
    FIELD(HsLayer, summary_unit), FIELD(HsLayer, code_factor), FIELD(HsLayer, block),
    FIELD(HsLayer, num_blocks), FIELD(HsLayer, num_heads), FIELD(HsLayer, num_kv_heads),
    FIELD(HsLayer, head_width), FIELD(HsLayer, window), FIELD(HsLayer, num_neurons),
    FIELD(HsLayer, scale), FIELD(HsLayer, rotary), FIELD(HsLayer, activation),
    FIELD(HsLayer, predictor_kind), FIELD(HsLayer, threshold), FIELD(HsLayer, predictor_threshold),
    STRUCT(HsOp),
    FIELD(HsOp, kind), FIELD(HsOp, layer), FIELD(HsOp, part), FIELD(HsOp, in), FIELD(HsOp, in_2),
    FIELD(HsOp, out),
    STRUCT(HsStep),
    FIELD(HsStep, embedding), FIELD(HsStep, positions), FIELD(HsStep, head),
    FIELD(HsStep, output_norm), FIELD(HsStep, layer), FIELD(HsStep, op), FIELD(HsStep, vector),
    FIELD(HsStep, table), FIELD(HsStep, select), FIELD(HsStep, rotary), FIELD(HsStep, workspace),
    FIELD(HsStep, times), FIELD(HsStep, fired), FIELD(HsStep, seen_predicted),
    FIELD(HsStep, seen_gate), FIELD(HsStep, seen_hidden), FIELD(HsStep, num_layers),
    FIELD(HsStep, num_ops), FIELD(HsStep, num_rotaries), FIELD(HsStep, width),
    FIELD(HsStep, context_length), FIELD(HsStep, num_neurons), FIELD(HsStep, max_rows),
    FIELD(HsStep, gate_bytes), FIELD(HsStep, up_bytes), FIELD(HsStep, down_bytes),
    FIELD(HsStep, predictor_bytes), FIELD(HsStep, attention_bytes), FIELD(HsStep, mode),
    FIELD(HsStep, key_kind), FIELD(HsStep, value_kind), FIELD(HsStep, is_key_rotated),
    FIELD(HsStep, is_value_rotated), FIELD(HsStep, embedding_scale),
    STRUCT(HsRow),
    FIELD(HsRow, token), FIELD(HsRow, position), FIELD(HsRow, sequence), FIELD(HsRow, has_logits),
    FIELD(HsRow, source), FIELD(HsRow, unused),
    STRUCT(HsPart),
    FIELD(HsPart, step), FIELD(HsPart, row), FIELD(HsPart, num_rows), FIELD(HsPart, named),
    FIELD(HsPart, logits), FIELD(HsPart, begin), FIELD(HsPart, end),
    STRUCT(HsNeurons),
    FIELD(HsNeurons, block), FIELD(HsNeurons, x), FIELD(HsNeurons, named), FIELD(HsNeurons, y),
    FIELD(HsNeurons, fired), FIELD(HsNeurons, workspace), FIELD(HsNeurons, width),
    FIELD(HsNeurons, num_neurons), FIELD(HsNeurons, num_tokens), FIELD(HsNeurons, max_tokens),
    FIELD(HsNeurons, gate_bytes), FIELD(HsNeurons, up_bytes), FIELD(HsNeurons, down_bytes),
    FIELD(HsNeurons, activation), FIELD(HsNeurons, mode), FIELD(HsNeurons, threshold),
    STRUCT(HsCopy),
    FIELD(HsCopy, from), FIELD(HsCopy, to), FIELD(HsCopy, num_bytes),
    STRUCT(HsCopies),
    FIELD(HsCopies, copy), FIELD(HsCopies, count),
    {nullptr, nullptr, 0, 0},
};
// clang-format on

}  // namespace

extern "C" __attribute__((visibility("default"))) const StructField* hs_struct_fields() {
    return FIELDS;
}
