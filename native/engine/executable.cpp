// Construction, checks and the walk over the op list; the ops themselves are in executable_ops.cpp.
#include "engine/executable.h"

#include <algorithm>

#include "engine/error.h"
#include "engine/executable_sizes.h"

namespace lockstep {

Executable::Executable(const KernelTable* kernels, DType dtype, DType kv_dtype, Limits limits, int64_t threads, std::vector<BufferShape> buffers,
                       std::vector<KVLayerShape> kv_layers, std::vector<OpCall> ops)
    : kernels_(kernels),
      dtype_(dtype),
      kv_dtype_(kv_dtype),
      limits_(std::move(limits)),
      buffers_(std::move(buffers)),
      kv_layers_(std::move(kv_layers)),
      ops_(std::move(ops)),
      team_(threads) {
  if (dtype_ == DType::int8) fail("int8 is a dtype of KV, not of matrices");
  if (limits_.block_size < 1 || limits_.tokens_max < 1 || limits_.rows_max < 1 || limits_.samples_max < 1) {
    fail("limits must be at least 1: tokens ", limits_.tokens_max, ", rows ", limits_.rows_max, ", samples ", limits_.samples_max, ", block size ",
         limits_.block_size);
  }
  for (const KVLayerShape& layer : kv_layers_) {
    if (layer.group < 0 || layer.group >= static_cast<int64_t>(limits_.block_counts.size())) {
      fail("a KV layer is of group ", layer.group, ", the limits have ", limits_.block_counts.size(), " groups");
    }
    if (layer.kv_heads < 1 || layer.head_dim < 2 || layer.head_dim % 2 != 0 || layer.head_dim > head_dim_max) {
      fail("a KV layer has ", layer.kv_heads, " heads of ", layer.head_dim, ", expected an even width up to ", head_dim_max);
    }
    if (layer.latent < 0 || layer.latent > layer.head_dim) fail("values are the last ", layer.latent, " elements of keys of ", layer.head_dim);
  }
  for (const OpCall& op : ops_) check_op(op);
  note_windows();
  allocate();
}

void Executable::note_windows() {
  std::vector<int64_t>& windows = limits_.windows;
  windows.assign(limits_.block_counts.size(), -1);
  for (const KVLayerShape& layer : kv_layers_) windows[static_cast<size_t>(layer.group)] = 1;  // what is written must be there
  for (const OpCall& op : ops_) {
    if (op.kind != OpKind::paged_attention) continue;
    int64_t& window = windows[static_cast<size_t>(kv_layers_[static_cast<size_t>(op.kv_layer)].group)];
    window = window == 0 || op.window == 0 ? 0 : std::max(window, op.window);
  }
}

int64_t Executable::buffer_rows_max(int64_t buffer) const {
  return buffers_[static_cast<size_t>(buffer)].by_sample ? limits_.samples_max : limits_.tokens_max;
}

int64_t Executable::rows_of(int64_t buffer, const Step& step) const {
  return buffers_[static_cast<size_t>(buffer)].by_sample ? step.sampling.count : step.tokens;
}

void Executable::allocate() {
  const int64_t threads = team_.size();
  for (size_t i = 0; i < buffers_.size(); ++i) {
    memory_.emplace_back(buffer_rows_max(static_cast<int64_t>(i)) * buffers_[i].width * 4);
    data_.push_back(memory_.back().floats());
  }
  const int64_t element = kv_dtype_ == DType::float32 ? 4 : kv_dtype_ == DType::bfloat16 ? 2 : 1;
  for (const KVLayerShape& layer : kv_layers_) {
    const int64_t bytes = limits_.block_counts[static_cast<size_t>(layer.group)] * layer.kv_heads * layer.head_dim * limits_.block_size * element;
    const int64_t scales =
        kv_dtype_ == DType::int8 ? limits_.block_counts[static_cast<size_t>(layer.group)] * layer.kv_heads * limits_.block_size * 4 : 0;
    const bool latent = layer.latent > 0;
    kv_.push_back({ZeroedMemory(bytes), ZeroedMemory(latent ? 0 : bytes), ZeroedMemory(scales), ZeroedMemory(latent ? 0 : scales)});
  }
  int64_t prepared_bytes = 0, gathered_floats = 0, expert_floats = 0;
  for (const OpCall& op : ops_) {
    if (op.kind == OpKind::embed) vocabulary_ = vocabulary_ == 0 ? op.weight->rows : std::min(vocabulary_, op.weight->rows);
    if (op.kind == OpKind::sample) sampled_width_ = std::max(sampled_width_, buffer_width(op.input));
    if (op.kind == OpKind::experts) {
      const int64_t width = buffer_width(op.input), ffn = op.bias->columns, rows = limits_.tokens_max;
      prepared_bytes = std::max(prepared_bytes, rows * prepared_stride(std::max(width, ffn)) * 4);
      gathered_floats = std::max(gathered_floats, rows * width);
      expert_floats = std::max(expert_floats, rows * ffn);
      expert_starts_.resize(std::max(expert_starts_.size(), static_cast<size_t>(op.expert_count) + 1));
      chosen_.resize(std::max(chosen_.size(), static_cast<size_t>(rows * op.top_k)));
    }
    if (op.kind == OpKind::route) scores_floats_ = std::max(scores_floats_, 2 * ((op.expert_count + 15) / 16 * 16));
    if (op.kind == OpKind::linear) prepared_bytes = std::max(prepared_bytes, buffer_rows_max(op.input) * prepared_stride(op.weight->columns) * 4);
    if (op.kind == OpKind::head_linear) {
      const int64_t k = op.weight->columns, rows = buffer_rows_max(op.input) * op.heads;
      prepared_bytes = std::max(prepared_bytes, rows * prepared_stride(k) * 4);
      gathered_floats = std::max(gathered_floats, rows * std::max(k, op.weight->rows / op.heads));
    }
    if (op.kind == OpKind::rope_write || op.kind == OpKind::latent_write) {
      if (rope_table(op) == nullptr) {
        const int64_t bytes = limits_.tokens_max * op.weight->columns * 4;
        rope_tables_.push_back({op.weight.get(), op.scale, ZeroedMemory(bytes), ZeroedMemory(bytes)});
      }
    }
    if (op.kind == OpKind::paged_attention) {
      const KVLayerShape& layer = kv_layers_[static_cast<size_t>(op.kv_layer)];
      const int64_t group = op.heads / layer.kv_heads;
      attention_scratch_floats_ = std::max(attention_scratch_floats_, kernels_->attention_scratch_floats(attention_tokens, group, layer.head_dim));
    }
  }
  attention_scratch_floats_ = (attention_scratch_floats_ + 1023) / 1024 * 1024;
  prepared_ = ZeroedMemory(prepared_bytes);
  gathered_ = ZeroedMemory(gathered_floats * 4);
  expert_out_ = ZeroedMemory(gathered_floats * 4);
  expert_gate_up_ = ZeroedMemory(2 * expert_floats * 4);
  expert_activated_ = ZeroedMemory(expert_floats * 4);
  scores_ = ZeroedMemory(scores_floats_ * threads * 4);
  attention_scratch_ = ZeroedMemory(attention_scratch_floats_ * threads * 4);
  token_rows_.resize(static_cast<size_t>(limits_.tokens_max));
  sample_errors_.resize(static_cast<size_t>(limits_.samples_max));
  for (int64_t thread = 0; sampled_width_ > 0 && thread < threads; ++thread) samplers_.emplace_back(kernels_, sampled_width_);
}

void Executable::check_op(const OpCall& op) const {
  const auto count = static_cast<int64_t>(buffers_.size());
  const bool reads = op.kind != OpKind::embed, writes = op.kind != OpKind::sample;
  if ((reads && (op.input < 0 || op.input >= count)) || (writes && (op.output < 0 || op.output >= count))) {
    fail("an op names buffers ", op.input, " and ", op.output, " of ", count);
  }
  const int64_t in = reads ? buffer_width(op.input) : 0, out = writes ? buffer_width(op.output) : 0;
  const auto expect = [&](const char* what, int64_t wanted, int64_t got) {
    if (wanted != got) fail(what, " must be ", wanted, " wide, got ", got);
  };
  if ((op.kind == OpKind::embed || op.kind == OpKind::rms_norm || op.kind == OpKind::linear || op.kind == OpKind::rope_write ||
       op.kind == OpKind::experts || op.kind == OpKind::head_linear || op.kind == OpKind::latent_write) &&
      op.weight == nullptr) {
    fail("an op that reads a weight was given none");
  }
  switch (op.kind) {
    case OpKind::embed:
      if (op.weight->layout == Layout::vector) fail("embed needs a table, got a vector");
      return expect("embed's output", op.weight->columns, out);
    case OpKind::rms_norm: return check_norm(op);
    case OpKind::linear: return check_linear(op);
    case OpKind::head_linear: return check_head_linear(op);
    case OpKind::rope_write:
    case OpKind::latent_write:
    case OpKind::paged_attention: return check_attention_shapes(op);
    case OpKind::gated_activation: return expect("gated_activation's input", 2 * out, in);
    case OpKind::soft_cap:
      if (!(op.number > 0.0f)) fail("soft_cap's cap must be above 0, got ", op.number);
      return expect("soft_cap's output", in, out);
    case OpKind::route: return check_route(op);
    case OpKind::experts: return check_experts(op);
    case OpKind::select: return expect("select's output", in, out);
    case OpKind::sample:
      if (!buffers_[static_cast<size_t>(op.input)].by_sample) fail("sample's logits must be one row a sample");
      return;
  }
  fail("unknown op kind ", static_cast<int32_t>(op.kind));
}

void Executable::check_norm(const OpCall& op) const {
  const int64_t in = buffer_width(op.input), out = buffer_width(op.output), gain = op.weight->columns;
  if (op.weight->layout != Layout::vector) fail("rms_norm's gain must be packed as a vector");
  if (in != out) fail("rms_norm's output must be ", in, " wide, got ", out);
  if (op.accumulate && op.input == op.output) fail("rms_norm cannot add to the buffer that it reads");
  if (op.groups == 0 && (gain != in || op.column != 0)) fail("rms_norm's gain must be ", in, " wide, got ", gain);
  if (op.groups < 0 || op.column < 0 || op.column > in || op.groups > (in - op.column) / gain) {
    fail("rms_norm of ", op.groups, " vectors of its gain's width ", gain, " from column ", op.column, " does not fit a buffer ", in, " wide");
  }
}

void Executable::check_linear(const OpCall& op) const {
  if (op.weight->layout != Layout::panels) fail("linear's matrix must be packed as panels");
  if (op.weight->dtype != dtype_) fail("linear's matrix was packed for another dtype");
  if (op.input == op.output) fail("linear's x and y must not share memory");
  if (buffer_width(op.input) != op.weight->columns || buffer_width(op.output) != op.weight->rows) {
    fail("linear's matrix is ", op.weight->rows, "x", op.weight->columns, ", its buffers are ", buffer_width(op.output), " and ",
         buffer_width(op.input), " wide");
  }
  if (op.bias && (op.bias->layout != Layout::vector || op.bias->columns != op.weight->rows))
    fail("linear's bias must be a vector of ", op.weight->rows);
}

void Executable::check_head_linear(const OpCall& op) const {
  if (op.weight->layout != Layout::panels || op.weight->dtype != dtype_) fail("head_linear's matrix must be packed as panels of the program's dtype");
  const int64_t k = op.weight->columns;
  if (op.heads < 1 || op.weight->rows % op.heads != 0 || op.weight->rows / op.heads % panel_columns != 0) {
    fail("head_linear's matrix must have a multiple of ", panel_columns, " rows a head, got ", op.weight->rows, " for ", op.heads);
  }
  if (op.passed < 0 || buffer_width(op.input) != op.heads * (op.passed + k) ||
      buffer_width(op.output) != op.heads * (op.passed + op.weight->rows / op.heads)) {
    fail("head_linear over ", op.heads, " heads of ", op.weight->rows, "x", k, " that passes ", op.passed, " does not fit buffers ",
         buffer_width(op.output), " and ", buffer_width(op.input), " wide");
  }
  if (op.input == op.output) fail("head_linear's x and y must not share memory");
}

void Executable::check_route(const OpCall& op) const {
  const int64_t count = op.expert_count;
  if (buffer_width(op.input) != count || op.top_k < 1 || op.top_k > count || buffer_width(op.output) != 2 * op.top_k) {
    fail("route to ", op.top_k, " of ", count, " experts cannot read ", buffer_width(op.input), " logits and write ", buffer_width(op.output),
         " columns");
  }
  if (op.groups < 1 || count % op.groups != 0 || op.groups_kept < 1 || op.groups_kept > op.groups || op.group_best < 1 ||
      op.group_best > count / op.groups || op.groups_kept * (count / op.groups) < op.top_k) {
    fail("route keeps ", op.groups_kept, " of ", op.groups, " groups by their best ", op.group_best, ", which does not fit ", count, " experts");
  }
  if (op.weight && (op.weight->layout != Layout::vector || op.weight->columns != count)) fail("route's bias must be a vector of ", count);
}

void Executable::check_experts(const OpCall& op) const {
  const int64_t count = op.expert_count, width = buffer_width(op.input);
  if (op.second < 0 || op.second >= static_cast<int64_t>(buffers_.size()) || buffer_width(op.second) != 2 * op.top_k || op.top_k < 1) {
    fail("experts need a routing buffer of ", 2 * op.top_k, " columns");
  }
  if (op.bias == nullptr) fail("experts need two matrices");
  for (const PackedWeight* weight : {op.weight.get(), op.bias.get()}) {
    if (weight->layout != Layout::panels || weight->dtype != dtype_) fail("experts' matrices must be packed as panels of the program's dtype");
    if (count < 1 || weight->rows % count != 0 || weight->rows / count % panel_columns != 0) {
      fail("experts' matrices must have a multiple of ", panel_columns, " rows an expert, got ", weight->rows, " for ", count);
    }
  }
  const int64_t ffn = op.bias->columns;
  if (op.weight->rows / count != 2 * ffn || op.weight->columns != width || op.bias->rows / count != width || buffer_width(op.output) != width) {
    fail("experts of ", ffn, " do not fit buffers ", width, " and ", buffer_width(op.output), " wide");
  }
  if (op.input == op.output) fail("experts' x and y must not share memory");
  const auto check_bias = [&](const WeightPointer& bias, int64_t wanted) {
    if (bias && (bias->layout != Layout::vector || bias->columns != wanted)) fail("experts' bias must be a vector of ", wanted);
  };
  if ((op.gate_up_bias == nullptr) != (op.down_bias == nullptr)) fail("experts have both biases or none");
  check_bias(op.gate_up_bias, op.weight->rows);
  check_bias(op.down_bias, op.bias->rows);
}

void Executable::check_attention_shapes(const OpCall& op) const {
  if (op.kv_layer < 0 || op.kv_layer >= static_cast<int64_t>(kv_layers_.size())) fail("KV layer ", op.kv_layer, " of ", kv_layers_.size());
  const KVLayerShape& layer = kv_layers_[static_cast<size_t>(op.kv_layer)];
  if (op.heads < 1 || op.heads % layer.kv_heads != 0) fail(op.heads, " heads cannot share ", layer.kv_heads, " KV heads");
  if (op.kind != OpKind::paged_attention && (op.kind == OpKind::latent_write) != (layer.latent > 0)) {
    fail("KV that is kept as keys alone is written by latent_write, other KV by rope_write");
  }
  const int64_t width = op.heads * layer.head_dim, keys = layer.kv_heads * layer.head_dim;
  const int64_t input = op.kind == OpKind::rope_write ? width + 2 * keys : width;
  const int64_t output = op.kind == OpKind::paged_attention ? op.heads * layer.value_dim() : width;
  if (buffer_width(op.output) != output || buffer_width(op.input) != input) {
    fail("attention over ", op.heads, " heads of ", layer.head_dim, " needs buffers ", input, " and ", output, " wide, got ", buffer_width(op.input),
         " and ", buffer_width(op.output));
  }
  if (op.kind == OpKind::latent_write) {
    if (op.second < 0 || op.second >= static_cast<int64_t>(buffers_.size()) || buffer_width(op.second) != keys) {
      fail("latent_write needs a buffer of keys ", keys, " wide");
    }
  }
  if (op.kind == OpKind::paged_attention && op.weight && (op.weight->layout != Layout::vector || op.weight->columns != op.heads)) {
    fail("attention's sinks must be a vector of ", op.heads);
  }
  if (op.kind != OpKind::paged_attention && (op.weight->layout != Layout::vector || op.weight->columns > layer.head_dim / 2)) {
    fail("inverse_frequencies must be a vector of at most ", layer.head_dim / 2, ", got ", op.weight->columns);
  }
  if (op.window < 0 || !(op.soft_cap >= 0.0f)) fail("attention's window and soft cap must be at least 0, got ", op.window, " and ", op.soft_cap);
}

int64_t Executable::kv_bytes() const {
  int64_t bytes = 0;
  for (const KVMemory& layer : kv_) bytes += layer.keys.bytes() + layer.values.bytes() + layer.key_scales.bytes() + layer.value_scales.bytes();
  return bytes;
}

KVView Executable::kv_view(int64_t layer) const {
  const KVLayerShape& shape = kv_layers_[static_cast<size_t>(layer)];
  const KVMemory& memory = kv_[static_cast<size_t>(layer)];
  return {memory.keys.data(), memory.values.data(), memory.key_scales.floats(), memory.value_scales.floats(),
          shape.kv_heads,     shape.head_dim,       shape.latent,               limits_.block_size,
          kv_dtype_};
}

void Executable::run(const Step& step, const std::vector<Binding>& bindings, const SampleColumns& samples) {
  team_.wake();
  check_step(step, limits_, vocabulary_, samples.top_count);
  check_choices(step, sampled_width_);
  for (size_t i = 0; i < memory_.size(); ++i) data_[i] = memory_[i].floats();
  for (const Binding& binding : bindings) data_[static_cast<size_t>(binding.buffer)] = binding.data;
  if (step.tokens == 0) return;
  plan_runs(step);
  fill_rope_tables(step);
  for (const OpCall& op : ops_) run_op(op, step, samples);
}

// Tokens that attention takes together: of one row, at most attention_tokens.
void Executable::plan_runs(const Step& step) {
  runs_.clear();
  for (int64_t row = 0; row < step.rows; ++row) {
    for (int64_t token = step.row_starts[row]; token < step.row_starts[row + 1]; ++token)
      token_rows_[static_cast<size_t>(token)] = static_cast<int32_t>(row);
    // The last run first: it sees the most keys, and a long item taken last would be waited for.
    for (int64_t end = step.row_starts[row + 1]; end > step.row_starts[row];) {
      const int64_t begin = std::max<int64_t>(step.row_starts[row], end - attention_tokens);
      runs_.push_back({row, begin, end});
      end = begin;
    }
  }
}

}  // namespace lockstep
