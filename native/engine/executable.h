// One stage's program as a list of calls on preallocated buffers: a whole step is one `run`.
//
// Knows buffers by index, packed weights and its own KV; does not know names, Python or what a request is. Work is shared among threads by rows,
// by output columns and by (token run, KV head), never across a sum.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/memory.h"
#include "engine/packed_weight.h"
#include "engine/executable_sizes.h"
#include "engine/sampler.h"
#include "engine/step.h"
#include "engine/thread_team.h"
#include "kernels/table.h"

namespace lockstep {

using WeightPointer = std::shared_ptr<const PackedWeight>;

struct BufferShape {
  bool by_sample;  // rows are S, else T
  int64_t width;
};

struct KVLayerShape {
  int64_t kv_heads;
  int64_t head_dim;
  int64_t group;
  int64_t latent;  // above 0: a value is the last so many elements of its key, and is not kept beside it
  int64_t value_dim() const { return latent > 0 ? latent : head_dim; }
};

enum class OpKind : int32_t {
  embed,
  rms_norm,
  linear,
  head_linear,
  rope_write,
  latent_write,
  paged_attention,
  gated_activation,
  soft_cap,
  route,
  experts,
  select,
  sample
};
enum class Activation : int32_t { silu, gelu_tanh, clamped_silu };

// Fields that a kind does not use are left as they are here. Meanings: `lockstep.ops.vocabulary`.
struct OpCall {
  OpKind kind;
  int64_t input = -1;  // buffer index
  int64_t output = -1;
  WeightPointer weight = nullptr;
  WeightPointer bias = nullptr;  // experts: down
  bool accumulate = false;
  float number = 0.0f;  // rms_norm: eps; paged_attention: scale; soft_cap: cap
  int64_t kv_layer = -1;
  int64_t heads = 0;
  float scale = 1.0f;    // embed: scale; rope_write: magnitude
  float offset = 0.0f;   // rms_norm, on the gain
  int64_t column = 0;    // rms_norm: `groups` vectors of the gain's width from this column on, or with 0 of them whole rows
  int64_t groups = 0;
  int64_t window = 0;    // paged_attention
  float soft_cap = 0.0f;
  Activation activation = Activation::silu;
  int64_t second = -1;  // experts: the buffer that says which, as route writes it; latent_write: that of keys
  int64_t expert_count = 0;
  int64_t top_k = 0;
  bool sigmoid = false;  // route
  bool renormalise = false;
  int64_t groups_kept = 0;  // route, of `groups`
  int64_t group_best = 0;
  int64_t passed = 0;  // head_linear
  WeightPointer gate_up_bias = nullptr;  // experts
  WeightPointer down_bias = nullptr;
};

// Caller's memory that stands in for a buffer during one step.
struct Binding {
  int64_t buffer;
  float* data;
};

class Executable {
 public:
  // Throws EngineError if the ops, shapes and weights do not fit together.
  // dtype: of matrices and their products; kv_dtype: of KV.
  Executable(const KernelTable* kernels, DType dtype, DType kv_dtype, Limits limits, int64_t threads, std::vector<BufferShape> buffers,
             std::vector<KVLayerShape> kv_layers, std::vector<OpCall> ops);

  // Check the step, then run every op. Throws EngineError before anything is written if the step is malformed, and after if logits hold NaN.
  void run(const Step& step, const std::vector<Binding>& bindings, const SampleColumns& samples);

  int64_t kv_bytes() const;
  // The work buffer's own memory (not a binding's), [rows, width].
  const float* buffer_data(int64_t buffer) const { return memory_[static_cast<size_t>(buffer)].floats(); }
  int64_t buffer_rows_max(int64_t buffer) const;
  int64_t buffer_width(int64_t buffer) const { return buffers_[static_cast<size_t>(buffer)].width; }

 private:
  struct KVMemory {
    ZeroedMemory keys;
    ZeroedMemory values;
    ZeroedMemory key_scales;
    ZeroedMemory value_scales;
  };
  struct RopeTable {
    const PackedWeight* inverse_frequencies;
    float magnitude;
    ZeroedMemory cosines;  // [tokens_max, frequencies]
    ZeroedMemory sines;
  };
  // Tokens [token_begin, token_end) of row `row`, which attention takes together.
  struct TokenRun {
    int64_t row;
    int64_t token_begin;
    int64_t token_end;
  };

  void check_op(const OpCall& op) const;
  void check_norm(const OpCall& op) const;
  void check_linear(const OpCall& op) const;
  void check_attention_shapes(const OpCall& op) const;
  void check_experts(const OpCall& op) const;
  void check_head_linear(const OpCall& op) const;
  void check_route(const OpCall& op) const;
  void note_windows();
  void allocate();
  int64_t rows_of(int64_t buffer, const Step& step) const;
  void plan_runs(const Step& step);
  void fill_rope_tables(const Step& step);
  const RopeTable* rope_table(const OpCall& op) const;
  KVView kv_view(int64_t layer) const;

  void run_op(const OpCall& op, const Step& step, const SampleColumns& samples);
  void embed(const OpCall& op, const Step& step);
  void rms_norm(const OpCall& op, const Step& step);
  void linear(const OpCall& op, const Step& step);
  void head_linear(const OpCall& op, const Step& step);
  // y[rows, n] = x[rows, k] @ weight[first_row .. first_row + n].T (+ bias) (+ y). first_row: of a panel's beginning.
  void multiply(const float* x, int64_t rows, const PackedWeight& weight, int64_t first_row, int64_t n, const float* bias, float* y, bool accumulate);
  void rope_write(const OpCall& op, const Step& step);  // also latent_write
  void paged_attention(const OpCall& op, const Step& step);
  void gated_activation(const OpCall& op, const Step& step);
  void soft_cap(const OpCall& op, const Step& step);
  void route(const OpCall& op, const Step& step);
  void experts(const OpCall& op, const Step& step);
  void gather(const OpCall& op, const Step& step);
  void select(const OpCall& op, const Step& step);
  void sample(const OpCall& op, const Step& step, const SampleColumns& samples);

  using GatedActivation = void (*)(const float* gate_up, int64_t width, float* y);
  GatedActivation activation_of(const OpCall& op) const;

  // body(begin, end) over [0, rows) in runs; one run on the calling thread where `row_cost` (floats touched a row) makes more not worth it.
  template <class Body>
  void over_rows(int64_t rows, int64_t row_cost, const Body& body);

  const KernelTable* kernels_;
  DType dtype_;
  DType kv_dtype_;
  Limits limits_;
  std::vector<BufferShape> buffers_;
  std::vector<KVLayerShape> kv_layers_;
  std::vector<OpCall> ops_;
  int64_t vocabulary_ = 0;     // of the embedding; 0 without one
  int64_t sampled_width_ = 0;  // of the logits; 0 where the program does not sample
  std::vector<ZeroedMemory> memory_;
  std::vector<float*> data_;  // a buffer's memory in this step: its own or the caller's
  std::vector<KVMemory> kv_;
  std::vector<RopeTable> rope_tables_;
  ZeroedMemory prepared_;  // linear's input rounded to its dtype
  ZeroedMemory attention_scratch_;
  int64_t attention_scratch_floats_ = 0;  // a thread
  // Of one call of experts: tokens of expert e are chosen_[expert_starts_[e]] .., ascending.
  struct Choice {
    int32_t token;
    float weight;
  };
  std::vector<Choice> chosen_;
  std::vector<int64_t> expert_starts_;
  ZeroedMemory gathered_, expert_gate_up_, expert_activated_, expert_out_;  // rows of one expert's tokens; head_linear: of all heads
  ZeroedMemory scores_;                                                     // route's, [thread][2, experts padded]
  int64_t scores_floats_ = 0;
  std::vector<TokenRun> runs_;
  std::vector<int32_t> token_rows_;         // [T], the row of each token
  std::vector<Sampler> samplers_;           // a thread
  std::vector<std::string> sample_errors_;  // [S]
  ThreadTeam team_;
};

template <class Body>
void Executable::over_rows(int64_t rows, int64_t row_cost, const Body& body) {
  const int64_t pieces = std::min({rows, team_.size() * 2, rows * row_cost / floats_worth_a_thread});
  if (pieces <= 1) return body(0, rows);
  team_.run(pieces, [&](int64_t piece, int64_t) { body(rows * piece / pieces, rows * (piece + 1) / pieces); });
}

}  // namespace lockstep
