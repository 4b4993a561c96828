// The kernels of one instruction set as a table of plain functions, and the plain structs that they take.
//
// Knows pointers, sizes and strides; does not know programs, threads, Python or where memory comes from. Nothing here
// checks anything: the engine has checked ids, tables and offsets before a kernel sees them.
//
// The law for all of them: an output row is bit for bit a function of its input row, the weights and (attention) its request's KV.
// An element of a matrix product is one accumulator chain over K in ascending order, whatever the tile around it.
#pragma once

#include <cstdint>

namespace lockstep {

enum class DType : int32_t { float32 = 0, bfloat16 = 1, int8 = 2 };  // int8: of KV alone

constexpr int64_t lane_count = 16;     // floats in the unit that every kernel works in
constexpr int64_t panel_columns = 64;  // output columns in one panel of a packed matrix
constexpr int64_t tile_keys = 32;      // keys in one attention tile; tile j covers positions [32 j, 32 j + 32)

// y[rows, n] = x[rows, k] @ matrix[n, k].T (+ bias[n]) (+ y). `x` is what prepare_rows wrote.
// panels: float32 [ceil(n / 64)][k][64]; bfloat16 [ceil(n / 64)][ceil(k / 2)][64][2], both zero where n or k is padded.
struct LinearCall {
  const void* x;
  int64_t x_stride;  // elements of x's type between rows
  const void* panels;
  int64_t k;
  int64_t n;
  const float* bias;  // [n] or null
  float* y;           // row stride n
  bool accumulate;
};

// One KV layer. keys [block][kv_head][head_dim][block_size] (transposed, so that 16 keys are one load), values
// [block][kv_head][block_size][head_dim]; or none where `latent` is set: then a value is the last `latent` elements of its key.
// int8: an element is its integer times the scale of its position and head; scales [block][kv_head][block_size].
struct KVView {
  void* keys;
  void* values;
  float* key_scales;  // null unless int8
  float* value_scales;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t latent;
  int64_t block_size;
  DType dtype;
};

// y[width] = x / sqrt(mean(x * x) + eps) * (gain + offset) (+ y). x and y may be the same unless it accumulates.
struct NormCall {
  const float* x;
  const float* gain;
  float* y;
  int64_t width;
  float eps;
  float offset;
  bool accumulate;
};

// One token's.
struct RopeCall {
  const float* queries;  // [heads * head_dim]
  const float* keys;     // [kv_heads * head_dim]
  const float* values;   // likewise; not read where the KV layer is latent
  float* q;              // [heads * head_dim]
  const float* cosines;  // [half]
  const float* sines;
  int64_t half;  // pairs that turn, at most head_dim / 2
  int64_t heads;
  KVView kv;
  int64_t block;  // where the token's position lives
  int64_t offset;
};

// `token_count` tokens of one request at positions first_position, + 1, ..., over the query heads of one KV head.
struct AttentionCall {
  const float* q;  // of the first token, row stride heads * head_dim
  float* y;        // likewise, with heads as wide as values are
  KVView kv;
  const int32_t* block_table;  // the request's row
  int64_t heads;
  int64_t kv_head;
  int64_t first_position;
  int64_t token_count;
  float scale;
  int64_t window;  // positions that a query sees, its own the last of them; 0: all
  float soft_cap;      // 0: none
  const float* sinks;  // [heads], scores of a key that every query sees and that has no value; null: none
  float* scratch;  // attention_scratch_floats(...) floats, 64-byte aligned
};

struct LogitScan {
  float largest;   // of values that are not NaN
  int64_t argmax;  // lowest index that holds it
  bool has_nan;
};

struct GumbelCall {
  const float* logits;   // [n]
  const float* weights;  // exp(l - largest l) [n]; an id is kept where weights[id] >= threshold
  int64_t n;
  float scale;  // l = logits * scale
  float threshold;
  float largest;  // the largest l
  uint64_t seed;
  uint32_t position;
  int64_t first;  // an id that is kept: the place to start from (the argmax)
};

struct KernelTable {
  const char* name;
  int64_t rows_tile;       // rows that linear works on at once
  bool bfloat16_products;  // prepare_rows writes bfloat16 pairs rather than widened floats

  // Round `rows` rows of x to the matrix's dtype: float32 needs no call; bfloat16 writes rows of `stride` elements, zero beyond k.
  void (*prepare_rows)(const float* x, int64_t rows, int64_t k, void* prepared, int64_t stride);
  // Columns [16 first_group, 16 last_group) of panel `panel`, rows [row_begin, row_end).
  void (*linear_float32)(const LinearCall& call, int64_t panel, int64_t row_begin, int64_t row_end, int64_t group_begin, int64_t group_end);
  void (*linear_bfloat16)(const LinearCall& call, int64_t panel, int64_t row_begin, int64_t row_end, int64_t group_begin, int64_t group_end);
  void (*rms_norm)(const NormCall& call);
  void (*gated_silu)(const float* gate_up, int64_t width, float* y);
  void (*gated_gelu_tanh)(const float* gate_up, int64_t width, float* y);
  void (*gated_clamped_silu)(const float* gate_up, int64_t width, float* y);
  // y = cap * tanh(x / cap); x and y may be the same.
  void (*soft_cap)(const float* x, float cap, int64_t width, float* y);
  void (*scale)(float factor, int64_t width, float* y);
  void (*rope_write)(const RopeCall& call);
  void (*attention)(const AttentionCall& call);
  int64_t (*attention_scratch_floats)(int64_t token_count, int64_t group, int64_t head_dim);
  LogitScan (*scan_logits)(const float* logits, int64_t n);
  // out[i] = exp(logits[i] * scale - largest); returns their sum in a fixed order.
  double (*exp_shifted)(const float* logits, int64_t n, float scale, float largest, float* out);
  // out[g] = the largest of logits[16 g .. 16 g + 16).
  void (*group_maxima)(const float* logits, int64_t n, float* out);
  // The id with the largest l + gumbel among those kept, the lowest on a tie.
  int64_t (*gumbel_argmax)(const GumbelCall& call);
  // out[i] = gumbel(seed, position, ids[i]).
  void (*gumbel_of)(const uint32_t* ids, int64_t count, uint64_t seed, uint32_t position, float* out);
  void (*exp_of)(const float* x, int64_t count, float* out);
  void (*log_of)(const float* x, int64_t count, float* out);
  void (*tanh_of)(const float* x, int64_t count, float* out);
  // out[i] = ln((w[i] + 0.5) * 2^-24), w[i] < 2^24.
  void (*log_of_unit)(const uint32_t* w, int64_t count, float* out);
};

const KernelTable* portable_kernels();
#ifdef LOCKSTEP_HAS_AVX2
const KernelTable* avx2_kernels();
#endif
#ifdef LOCKSTEP_HAS_AVX512
const KernelTable* avx512_kernels();
#endif
#ifdef LOCKSTEP_HAS_AVX512_BF16
const KernelTable* avx512_bf16_kernels();
#endif

}  // namespace lockstep
