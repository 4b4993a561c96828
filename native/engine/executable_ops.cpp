// The ops: how each is shared among threads. The arithmetic is in the kernels.
#include <algorithm>
#include <cstring>

#include "engine/error.h"
#include "engine/executable.h"
#include "engine/executable_sizes.h"
#include "engine/trigonometry.h"

namespace lockstep {

void Executable::run_op(const OpCall& op, const Step& step, const SampleColumns& samples) {
  switch (op.kind) {
    case OpKind::embed: return embed(op, step);
    case OpKind::rms_norm: return rms_norm(op, step);
    case OpKind::linear: return linear(op, step);
    case OpKind::head_linear: return head_linear(op, step);
    case OpKind::rope_write:
    case OpKind::latent_write: return rope_write(op, step);
    case OpKind::paged_attention: return paged_attention(op, step);
    case OpKind::gated_activation: return gated_activation(op, step);
    case OpKind::soft_cap: return soft_cap(op, step);
    case OpKind::route: return route(op, step);
    case OpKind::experts: return experts(op, step);
    case OpKind::select: return select(op, step);
    case OpKind::sample: return sample(op, step, samples);
  }
}

void Executable::embed(const OpCall& op, const Step& step) {
  const int64_t width = op.weight->columns;
  float* y = data_[static_cast<size_t>(op.output)];
  over_rows(step.tokens, width * 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      unpack_row(*op.weight, step.token_ids[t], y + t * width);
      if (op.scale != 1.0f) kernels_->scale(op.scale, width, y + t * width);
    }
  });
}

void Executable::rms_norm(const OpCall& op, const Step& step) {
  const int64_t width = buffer_width(op.input);
  const float* x = data_[static_cast<size_t>(op.input)];
  float* y = data_[static_cast<size_t>(op.output)];
  over_rows(rows_of(op.input, step), width, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t g = 0; g < std::max<int64_t>(1, op.groups); ++g) {
        const int64_t at = r * width + op.column + g * op.weight->columns;
        kernels_->rms_norm({x + at, op.weight->floats(), y + at, op.weight->columns, op.number, op.offset, op.accumulate});
      }
    }
  });
}

void Executable::linear(const OpCall& op, const Step& step) {
  const int64_t rows = rows_of(op.input, step);
  multiply(data_[static_cast<size_t>(op.input)], rows, *op.weight, 0, op.weight->rows, op.bias ? op.bias->floats() : nullptr,
           data_[static_cast<size_t>(op.output)], op.accumulate);
}

void Executable::multiply(const float* x, int64_t rows, const PackedWeight& weight, int64_t first_row, int64_t n, const float* bias, float* y,
                          bool accumulate) {
  if (rows == 0) return;
  const int64_t k = weight.columns;
  const bool narrow = weight.dtype == DType::bfloat16;
  const int64_t panel_bytes = panel_columns * 4 * (narrow ? (k + 1) / 2 : k);
  const char* matrix = static_cast<const char*>(weight.data()) + first_row / panel_columns * panel_bytes;
  LinearCall call{x, k, matrix, k, n, bias, y, accumulate};
  auto kernel = kernels_->linear_float32;
  if (narrow) {
    kernel = kernels_->linear_bfloat16;
    call.x = prepared_.data();
    call.x_stride = prepared_stride(k);
    const int64_t row_bytes = call.x_stride * (kernels_->bfloat16_products ? 2 : 4);
    over_rows(rows, k, [&](int64_t begin, int64_t end) {
      kernels_->prepare_rows(x + begin * k, end - begin, k, static_cast<char*>(prepared_.data()) + begin * row_bytes, call.x_stride);
    });
  }
  // An item is a panel by a run of rows. With few panels and many threads, at rows so few that weights are all the traffic, half or a group of a
  // panel: it balances better, but reads memory in short stretches, which costs more than some imbalance.
  const int64_t panels = (n + panel_columns - 1) / panel_columns, groups = panel_columns / lane_count;
  const int64_t runs = std::max<int64_t>(1, (rows + rows_together / 2) / rows_together);
  const int64_t wanted = team_.size() == 1 ? 1 : team_.size() * 3;
  const int64_t pieces = rows > kernels_->rows_tile || panels >= wanted ? 1 : panels * 2 >= wanted ? 2 : groups;
  const int64_t tiles = (rows + kernels_->rows_tile - 1) / kernels_->rows_tile;
  team_.run(panels * pieces * runs, [&](int64_t item, int64_t) {
    const int64_t run = item % runs, piece = item / runs % pieces, panel = item / runs / pieces;
    const int64_t row_begin = tiles * run / runs * kernels_->rows_tile, row_end = std::min(rows, tiles * (run + 1) / runs * kernels_->rows_tile);
    kernel(call, panel, row_begin, row_end, groups * piece / pieces, groups * (piece + 1) / pieces);
  });
}

// Heads are gathered one below the other, [head][row], so that each is a product of its own on whole rows.
void Executable::head_linear(const OpCall& op, const Step& step) {
  const PackedWeight& weight = *op.weight;
  const int64_t rows = rows_of(op.input, step), k = weight.columns, n = weight.rows / op.heads, passed = op.passed;
  const int64_t x_width = op.heads * (passed + k), y_width = op.heads * (passed + n);
  const bool narrow = weight.dtype == DType::bfloat16;
  const float* x = data_[static_cast<size_t>(op.input)];
  float *y = data_[static_cast<size_t>(op.output)], *own = gathered_.floats(), *out = expert_out_.floats();
  const int64_t stride = narrow ? prepared_stride(k) : k, row_bytes = stride * (narrow && kernels_->bfloat16_products ? 2 : 4);
  over_rows(op.heads * rows, k * 2, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / rows, row = item % rows;
      const float *from = x + row * x_width + head * (passed + k);
      std::copy_n(from, passed, y + row * y_width + head * (passed + n));
      std::copy_n(from + passed, k, own + item * k);
      if (narrow) kernels_->prepare_rows(own + item * k, 1, k, static_cast<char*>(prepared_.data()) + item * row_bytes, stride);
    }
  });
  const int64_t panels = n / panel_columns, panel_bytes = panel_columns * 4 * (narrow ? (k + 1) / 2 : k);
  const auto kernel = narrow ? kernels_->linear_bfloat16 : kernels_->linear_float32;
  team_.run(op.heads * panels, [&](int64_t item, int64_t) {
    const int64_t head = item / panels;
    const char* rows_of_head = narrow ? static_cast<const char*>(prepared_.data()) : reinterpret_cast<const char*>(own);
    const char* matrix = static_cast<const char*>(weight.data()) + head * panels * panel_bytes;
    const LinearCall call{rows_of_head + head * rows * row_bytes, stride, matrix, k, n, nullptr, out + head * rows * n, false};
    kernel(call, item % panels, 0, rows, 0, panel_columns / lane_count);
  });
  over_rows(op.heads * rows, n, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      std::copy_n(out + item * n, n, y + item % rows * y_width + item / rows * (passed + n) + passed);
    }
  });
}

// Cosines and sines of this step's positions, once for all layers: the float32 product's cosine in float64, rounded.
void Executable::fill_rope_tables(const Step& step) {
  for (RopeTable& table : rope_tables_) {
    const int64_t half = table.inverse_frequencies->columns;
    const float* frequencies = table.inverse_frequencies->floats();
    over_rows(step.tokens, half * 40, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t i = 0; i < half; ++i) {
          const float angle = static_cast<float>(step.positions[t]) * frequencies[i];
          const SineCosine turned = sine_cosine(static_cast<double>(angle));
          table.cosines.floats()[t * half + i] = static_cast<float>(turned.cosine) * table.magnitude;
          table.sines.floats()[t * half + i] = static_cast<float>(turned.sine) * table.magnitude;
        }
      }
    });
  }
}

// Null if there is none yet.
const Executable::RopeTable* Executable::rope_table(const OpCall& op) const {
  const auto fits = [&](const RopeTable& table) { return table.inverse_frequencies == op.weight.get() && table.magnitude == op.scale; };
  const auto found = std::find_if(rope_tables_.begin(), rope_tables_.end(), fits);
  return found == rope_tables_.end() ? nullptr : &*found;
}

void Executable::rope_write(const OpCall& op, const Step& step) {
  const KVView kv = kv_view(op.kv_layer);
  const BlockTable& blocks = step.block_tables[static_cast<size_t>(kv_layers_[static_cast<size_t>(op.kv_layer)].group)];
  const RopeTable& table = *rope_table(op);
  const int64_t half = op.weight->columns, width = buffer_width(op.input), q_width = buffer_width(op.output), kv_width = kv.kv_heads * kv.head_dim;
  const bool latent = op.kind == OpKind::latent_write;
  const float* queries = data_[static_cast<size_t>(op.input)];
  const float* keys = latent ? data_[static_cast<size_t>(op.second)] : queries + q_width;
  const int64_t key_stride = latent ? kv_width : width;
  float* q = data_[static_cast<size_t>(op.output)];
  over_rows(step.tokens, width * 2, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = step.positions[t];
      const int32_t block = blocks.entries[token_rows_[static_cast<size_t>(t)] * blocks.width + position / kv.block_size];
      kernels_->rope_write({queries + t * width, keys + t * key_stride, keys + t * key_stride + kv_width, q + t * q_width, table.cosines.floats() + t * half, table.sines.floats() + t * half, half, op.heads, kv,
                            block, position % kv.block_size});
    }
  });
}

void Executable::paged_attention(const OpCall& op, const Step& step) {
  const KVView kv = kv_view(op.kv_layer);
  const BlockTable& blocks = step.block_tables[static_cast<size_t>(kv_layers_[static_cast<size_t>(op.kv_layer)].group)];
  const int64_t width = buffer_width(op.input), y_width = buffer_width(op.output);
  const float* q = data_[static_cast<size_t>(op.input)];
  float* y = data_[static_cast<size_t>(op.output)];
  const auto runs = static_cast<int64_t>(runs_.size());
  team_.run(runs * kv.kv_heads, [&](int64_t item, int64_t thread) {
    const TokenRun& run = runs_[static_cast<size_t>(item / kv.kv_heads)];
    AttentionCall call;
    call.q = q + run.token_begin * width;
    call.y = y + run.token_begin * y_width;
    call.kv = kv;
    call.block_table = blocks.entries + run.row * blocks.width;
    call.heads = op.heads;
    call.kv_head = item % kv.kv_heads;
    call.first_position = step.positions[run.token_begin];
    call.token_count = run.token_end - run.token_begin;
    call.scale = op.number;
    call.window = op.window;
    call.soft_cap = op.soft_cap;
    call.sinks = op.weight ? op.weight->floats() : nullptr;
    call.scratch = attention_scratch_.floats() + thread * attention_scratch_floats_;
    kernels_->attention(call);
  });
}

Executable::GatedActivation Executable::activation_of(const OpCall& op) const {
  switch (op.activation) {
    case Activation::silu: return kernels_->gated_silu;
    case Activation::gelu_tanh: return kernels_->gated_gelu_tanh;
    case Activation::clamped_silu: return kernels_->gated_clamped_silu;
  }
  fail("unknown activation ", static_cast<int32_t>(op.activation));
}

void Executable::gated_activation(const OpCall& op, const Step& step) {
  const int64_t width = buffer_width(op.output);
  const float* x = data_[static_cast<size_t>(op.input)];
  float* y = data_[static_cast<size_t>(op.output)];
  const GatedActivation kernel = activation_of(op);
  over_rows(rows_of(op.output, step), width * 3, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) kernel(x + r * 2 * width, width, y + r * width);
  });
}

void Executable::soft_cap(const OpCall& op, const Step& step) {
  const int64_t width = buffer_width(op.input);
  const float* x = data_[static_cast<size_t>(op.input)];
  float* y = data_[static_cast<size_t>(op.output)];
  over_rows(rows_of(op.input, step), width * 3, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) kernels_->soft_cap(x + r * width, op.number, width, y + r * width);
  });
}

void Executable::select(const OpCall& op, const Step& step) {
  const int64_t width = buffer_width(op.output);
  const float* x = data_[static_cast<size_t>(op.input)];
  float* y = data_[static_cast<size_t>(op.output)];
  for (int64_t s = 0; s < step.sampling.count; ++s) {
    std::memcpy(y + s * width, x + step.sampling.index[s] * width, static_cast<size_t>(width) * sizeof(float));
  }
}

void Executable::sample(const OpCall& op, const Step& step, const SampleColumns& samples) {
  const int64_t width = buffer_width(op.input);
  const float* logits = data_[static_cast<size_t>(op.input)];
  team_.run(step.sampling.count, [&](int64_t s, int64_t thread) {
    std::string& error = sample_errors_[static_cast<size_t>(s)];
    error.clear();
    try {
      samplers_[static_cast<size_t>(thread)].sample(logits + s * width, step.sampling, step.edits, s, samples);
    } catch (const EngineError& caught) {
      error = caught.what();
    }
  });
  for (int64_t s = 0; s < step.sampling.count; ++s) {
    if (!sample_errors_[static_cast<size_t>(s)].empty()) throw EngineError(sample_errors_[static_cast<size_t>(s)]);
  }
}

}  // namespace lockstep
