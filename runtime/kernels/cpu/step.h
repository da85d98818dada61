// A step of a whole model in one call, for one token or several. runtime/ops and runtime/step mirror
// these structs, and those of operations' files, field by field; a test compares them.
//
// Letters: T tokens, D model width, F neurons of a layer, N of a block, V vocabulary, H heads, K key-value
// heads, W head width. Layers may differ in F, H, K and W: a buffer that they share has room for the
// largest, and each layer uses its beginning, with rows of the layer's own length.
#pragma once
#include <stdint.h>

#include "gate.h"
#include "heads.h"
#include "kernels.h"
#include "tensors.h"

// Maximum computed rows of a step. Steps take 128 of a prompt, and more where experts are read from a drive.
constexpr int64_t MAX_ROWS = 512;
// Maximum rows including those whose keys and values are only copied, see HsRow.
constexpr int64_t MAX_STEP_ROWS = 4 * MAX_ROWS;
// A block of the cache holds the whole context, or at least this many positions, a number that
// divides PART (attention.h).
constexpr int64_t LEAST_BLOCK = 32;
constexpr int64_t MAX_SHARED_HEADS = 256;  // queries that share a key-value head
constexpr int64_t MAX_ROTARIES = 16;       // distinct rotary embeddings of a step
constexpr int64_t MAX_EXPERTS = 4096;      // of a layer
constexpr int64_t MAX_USED = 64;           // experts of a token
constexpr int64_t MAX_GROUPS = 64;         // of a layer's experts

enum Gating : int32_t { GATING_SOFTMAX, GATING_SIGMOID, GATING_SOFTMAX_OF_CHOSEN, NUM_GATINGS };
enum PredictorKind : int32_t { PREDICTOR_LINEAR, PREDICTOR_RELU };
// The parts of a step that are timed. The clock is read between parts, so they sum to the whole.
enum Timed : int32_t {
    TIMED_INPUTS,  // query, key and value projection, or those of a recurrent block
    TIMED_ATTEND,  // norms and rotation of heads, the cache, scores and sums; or the recurrence
    TIMED_OUTPUT,  // output projection
    TIMED_PREDICTOR,
    TIMED_NEURONS,    // of the layer's first block
    TIMED_NEURONS_2,  // of the others
    TIMED_HEAD,
    TIMED_OTHER,  // embedding, norms, sums
    NUM_TIMED
};

struct HsBlock {
    HsMatrix gate, up, down;
    const int32_t* id;   // [N] the neurons' ids in the layer, or null: 0 .. N-1
    const int32_t* row;  // [N] their rows in the matrices, or null: 0 .. N-1
    int64_t num_neurons;
    // down: one row per output, [D, F], as llama.cpp's files have it; all neurons are computed, in order
    int32_t is_by_output;
};

// The cache blocks of each sequence. A block has `block_length` positions in every layer of this table.
struct HsTable {
    const int32_t* block;  // [num_sequences, blocks_per_sequence]; below 0: absent
    int64_t num_sequences, blocks_per_sequence, block_length, num_blocks;
    int64_t window;  // only blocks of this many of the latest positions need be present; 0: all
};

// The positions that a token attends to, see key_selection.h: the first `sinks` positions, `top` positions found
// by search, and all from the key block of the `window`-th last position on. `sinks`, `top` and
// `window` are multiples of `block`, which divides the block length of the cache if a sequence has
// several cache blocks.
enum Summary : int32_t { SUMMARY_MEAN, SUMMARY_BOUNDS };
struct HsSelect {
    int64_t block;  // 0: a token attends to all positions
    int64_t sinks, window, top;
    int64_t candidates;         // keys are ranked by their codes among this many times `top`
    int64_t full;               // tokens at positions below it attend to all positions
    int32_t summary, is_coded;  // not coded: the best blocks are read whole
};

struct HsPredictor {
    HsMatrix down,
        up;  // up: [F, rank], or [F, D] if `down` is absent; absent: neurons are not predicted
    int32_t kind;
    float threshold;
};

// Chooses the experts of a row; the formula is in model/route.py.
struct HsRoute {
    HsMatrix router;           // [E, D]; absent: the layer has no experts
    const float* choice_bias;  // [E] or null
    const float* own_scale;    // [E] or null
    int64_t num_used, num_groups, num_used_groups;
    int32_t gating, renormalises;
    float scale;
    int32_t groups_by_largest;  // a group counts by its largest score, not by its two largest
};

// A matrix of each expert of a layer in a file, in the file's form: that of expert e begins at offset + e *
// stride. `matrix` is without data.
struct HsStack {
    HsMatrix matrix;
    int64_t offset, stride;
    int32_t file, unused;
};

// The files that experts are read from, what their reads share, and totals; see drive.h.
struct HsDrive {
    const int32_t* file;                // [num_files] descriptors
    const int64_t *size, *modified_ns;  // [num_files]; a file of another size or time has been changed
    uint8_t* buffer;                    // num_buffers of buffer_bytes, page-aligned
    int64_t num_files, buffer_bytes, num_buffers, num_threads;
    // Updates the worth [32 W] of a layer's experts with the bits [rows, W] of those that rows have
    // chosen, W words of num_experts bits: hs_cache_learn of the neuron cache's policy.
    void (*learn)(void* policy, int64_t layer, const uint32_t* bits, int64_t rows, float* worth);
    void* policy;
    void* reader;  // set by hs_open_drive
    int64_t num_experts;
    int64_t delay_us;  // for tests: the most by which a read comes late, in any order
    // Of all steps so far: expert uses of a step, those found in slots, experts that took a slot, bytes read,
    // nanoseconds in which reads were under way and in which a step waited for them.
    int64_t num_used, num_hits, num_kept, bytes_read, reading_ns, waiting_ns;
    int32_t error;        // of the first read that failed: an errno, or READ_CHANGED; 0: none has
    int32_t failed_file;  // its index
    float margin;         // an expert takes the slot of one whose worth is less by more than this
    int32_t unused;
};
constexpr int32_t READ_CHANGED = -1;  // the file was cut short or written to

// The slots of a layer's experts, whose memory is that of HsExperts, and where all of them are in files.
struct HsArriving {
    HsDrive* drive;
    HsStack gate, up, down;
    int32_t* place;   // HsExperts's
    int32_t* expert;  // [num_slots] the expert in each slot; below 0: none
    float* worth;     // [32 W]
    int64_t num_slots, layer;
};

// The experts of a layer. `first` is the first one; the matrices of each other one follow those of the
// one before at these distances in bytes, its biases without a gap.
struct HsExperts {
    HsBlock first;
    const float* down_bias;  // [E, D] of those stored, or null
    // [num_experts] the place of each expert among those stored, below 0: it is elsewhere; or null: all
    // are stored, in order
    const int32_t* place;
    int64_t gate_bytes, up_bytes, down_bytes, num_experts;
    // Experts that are not stored are read from files: `place` has the slots, and biases are those of all
    // experts, in order. Null: they are elsewhere.
    const HsArriving* arriving;
};

struct HsFeedForward {
    const float* down_bias;  // [D] or null
    const HsBlock* block;
    const HsExperts* experts;  // instead of `block`, in a layer with a router; or null
    int64_t num_blocks;
    int64_t
        num_neurons;  // F, of an expert if there are experts; 0: only the heads of the layer are used
    HsGate gate;
    int32_t unused;
};

struct HsLayer {
    const HsNorm* norm;  // [num_norms] of the hidden size, which OP_NORM has the index of
    int64_t num_norms;
    HsAttention attention;  // without heads: the layer does not attend
    HsPredictor predictor;
    HsFeedForward feed_forward;
    HsRoute route;
    HsFeedForward shared;  // experts that fire for every row; without blocks: none
    HsMatrix shared_gate;  // [1, D], their output is multiplied by sigmoid(shared_gate . in); or absent
};

// The operations of a step, in order, lowered from the program that step/program.py declares. Adjacent
// operations that process each row separately share one pass over the rows.
enum OpKind : int32_t {
    OP_EMBED,      // out = the rows of the tokens * the step's scale + learned positions, if any
    OP_NORM,       // out = norm `part` of in
    OP_ADD,        // out = scale * (in + factor * in_2)
    OP_ADD_BIAS,   // out = in + the bias of the down projection
    OP_ATTENTION,  // out = attention of in; appends to the cache
    OP_PREDICT,    // out = VALUE_NAMED, scores of all neurons from in
    // out = block `part` of the neurons, from in; with in_2 = VALUE_NAMED, of those named; with in_2 =
    // VALUE_ROUTED of the chosen experts
    OP_NEURONS,
    OP_HEAD_NORM,  // out = the output norm, if any, of in's rows with logits
    OP_HEAD,       // logits of in, which OP_HEAD_NORM has written
    OP_ATTEND,  // out = the heads' outputs for in, the queries, keys and values; appends to the cache
    OP_ROUTE,   // out = VALUE_ROUTED, the experts that the router chooses from in
    OP_SHARED,  // out = the shared experts of in
    // Operations of operation.h follow, with the numbers of hs_operation_kind.
    NUM_OP_KINDS
};
constexpr int32_t NUM_OWN = 8;  // values that only operations of operation.h have
enum Value : int32_t {
    VALUE_X,  // the hidden state, of HsStep's x_size
    VALUE_ATTN_IN,
    VALUE_FFN_IN,  // two, alternating by layer: a predictor may read the previous layer's
    VALUE_FFN_IN_2,
    VALUE_ATTN_OUT,
    VALUE_FFN_OUT,
    VALUE_HOT_OUT,  // in layers with divided neurons
    VALUE_COLD_OUT,
    VALUE_QKV,  // [(H + 2 K) W, (2 H + 2 K) W with gates, (H + K) W if values are keys, or H W if they are another layer's] queries, keys and values, if a GPU has projected them; overwritten
    VALUE_HEADS,   // [H W]
    VALUE_NAMED,   // [F] scores; a neuron is named if its score is above the predictor's threshold
    VALUE_ROUTED,  // [2 K] experts, as numbers, and their weights
    VALUE_SHARED_OUT,
    VALUE_OWN,                         // those of HsStep's own_size, from here on
    VALUE_NONE = VALUE_OWN + NUM_OWN,  // no vector
    NUM_VALUES = VALUE_NONE
};
struct HsOp {
    int32_t kind, layer;  // num_layers: outside the layers
    int32_t part;
    int32_t in, in_2, out;              // values
    float factor = 1.0f, scale = 1.0f;  // of in_2 and of the whole sum in OP_ADD
    // Of operations of operation.h alone: further values, and the struct of their weights.
    int32_t in_3 = VALUE_NONE, out_2 = VALUE_NONE;
    const void* weights = nullptr;
};

struct HsStep {
    HsMatrix embedding, positions, head;
    HsNorm output_norm;
    const HsLayer* layer;
    const HsOp* op;
    // [max_rows, D or the value's own size] values that are shared with other devices. Null: in the
    // workspace.
    float* vector[NUM_VALUES];
    const HsTable* table;  // [num_tables], of the same sequences
    HsSelect select;
    const HsRotary* rotary;  // [num_rotaries]
    uint8_t* workspace;      // hs_step_bytes(), 64-aligned
    // [num_layers + 1, NUM_TIMED, 2] nanoseconds and weight bytes of all steps so far; the last row is
    // for parts outside the layers. Null: the clock is not read.
    int64_t* times;
    // What observers see of a layer, for two rows or more; null: nothing is written. The heads' outputs,
    // written by OP_ATTENTION and recurrent operations; [max_rows, F] the predictor's scores, written by OP_PREDICT; gates
    // before the activation (NaN where a neuron is not predicted) and hidden values, written by OP_NEURONS,
    // of chosen experts [max_rows, K, F]; hidden values of shared experts, written by OP_SHARED.
    float *seen_heads, *seen_predicted, *seen_gate, *seen_hidden, *seen_shared;
    int64_t num_layers, num_ops, num_rotaries, num_tables, width, context_length;
    int64_t num_neurons;        // of the layer with most
    int64_t max_rows;           // 1 .. MAX_ROWS
    int64_t x_size;             // floats per token of VALUE_X; 0: D
    int64_t own_size[NUM_OWN];  // of VALUE_OWN and those after it; 0: there is none
    // Bytes of the weight rows that all steps so far needed, see NeuronBytes.
    int64_t gate_bytes, up_bytes, down_bytes, predictor_bytes;
    int64_t attention_bytes;  // of projections, and of operations of operation.h in layers
    int32_t key_kind, value_kind, is_key_rotated, is_value_rotated;  // of the cache
    float embedding_scale;  // multiplies the rows of the embedding
    float logit_cap;        // c: a logit l counts as c tanh(l / c); 0: as it is
};

// A token of a step. The computed rows of one sequence follow one another without gaps in position; each
// attends to the positions of its sequence up to its own (see HsSelect and the layer's window). A row with a source is not
// computed: the keys and values of that earlier row are copied to this row's sequence.
struct HsRow {
    int64_t token, position;
    int32_t sequence, has_logits;
    int32_t source;  // below 0: the row is computed
    // Slots of the recurrent states, below 0: none. The first row of a sequence begins with
    // the state in slot `reads`, or with zeros; the state after a row is stored in its slot `writes`.
    int32_t reads, writes;
    // Rows of an earlier pass whose inputs have been kept, which the first row of a sequence repeats after what is in
    // `reads`: num_again of them from `again` on. The state after those is stored in slot `begins`.
    int32_t again, num_again, begins;
    int32_t keeps;  // where this row's inputs are kept; below 0: nowhere
};

// Consecutive operations of a step that a hybrid step runs on the host in one call, for all rows. Values
// shared with other devices are in HsStep's `vector`.
struct HsPart {
    HsStep* step;
    const HsRow* row;         // computed rows, at most the step's max_rows
    const int64_t* num_rows;  // their number in this step
    uint32_t* named;  // [T, F / 32 rounded up] one bit per neuron, written by OP_PREDICT; or null
    float* logits;    // [rows that have them, V] or null
    int64_t begin, end;
};

// The neurons or experts of one layer that are stored here, for T tokens: the CPU's part of a divided layer.
struct HsNeurons {
    HsBlock block;
    const HsExperts* experts;  // in place of `block`, or null
    const float* x;            // [T, D]
    const uint32_t* named;     // [T, F / 32 rounded up] one bit per neuron of the layer, or null: all
    const float* routed;       // of experts: [T, 2 K] the chosen ones, as numbers, and their weights
    float* y;                  // [T, D], written
    uint32_t* fired;           // bits like `named`, written: those whose `down` row is used; or null
    uint8_t* workspace;        // hs_neurons_bytes(), 64-aligned
    int64_t width, num_neurons, num_used;  // D, F, K
    int64_t num_tokens, max_tokens;        // T, 1 .. max_tokens; the workspace is for max_tokens
    // of rows that all calls so far needed, see NeuronBytes
    int64_t gate_bytes, up_bytes, down_bytes;
    HsGate gate;
};

extern "C" {
// The number of an operation that is in a file of its own (operation.h), by its kind in the step program; -1 if
// there is none.
int32_t hs_operation_kind(const char* kind);
// The workspace bytes of a step, or -1 if sizes, kinds, pointers or operations are inconsistent.
int64_t hs_step_bytes(const HsStep* step);
// Appends the keys and values of `count` rows to the cache and writes logits [rows that have them, V].
// Results are bit-identical for any number of threads and, if weights are finite, whatever other rows are
// in the step. STATUS_INDEX_OUT_OF_RANGE for an impossible token or position, or if the sequence has no
// block there; STATUS_BAD_ARGUMENT for an unknown sequence, a wrong source, too many rows or rows out
// of order.
int32_t hs_step(HsStep* step, const HsRow* row, int64_t count, float* logits);
// Runs a part; `data` is a HsPart*, as in the signature of a CUDA graph's host function. Does not
// check the rows.
void hs_part(void* data);
// Starts the threads that read from a drive; false if the system refuses. hs_close_drive ends them.
int32_t hs_open_drive(HsDrive* drive);
void hs_close_drive(HsDrive* drive);
// The workspace bytes of neurons or experts, or -1 if sizes, kinds or pointers are inconsistent.
int64_t hs_neurons_bytes(const HsNeurons* neurons);
// y = the output of the predicted neurons (all, if `named` is null), or the weighted sum of those of the chosen
// experts that are stored. `data` is a HsNeurons*, as in the signature of a CUDA graph's host function. Does not
// check its arguments.
void hs_neurons(void* data);
}
