#include "engine/probe.h"

#include <cstring>
#include <memory>
#include <vector>

#include "engine/packed_weight.h"
#include "engine/trigonometry.h"

namespace lockstep {
namespace {

// Floats of both signs whose sizes spread over 2^-8 .. 2^8, from a fixed linear congruential sequence.
class Inputs {
 public:
  std::vector<float> take(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      const uint32_t bits = static_cast<uint32_t>(state_ >> 32);
      const uint32_t float_bits = (bits & 0x807fffffu) | (119u + (bits >> 23 & 15u)) << 23;
      std::memcpy(&value, &float_bits, sizeof value);
    }
    return values;
  }

 private:
  uint64_t state_ = 1;
};

// FNV-1a.
class Hash {
 public:
  void add(const std::vector<float>& values) {
    for (const float value : values) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      for (int byte = 0; byte < 4; ++byte) hash_ = (hash_ ^ (bits >> 8 * byte & 0xffu)) * 16777619u;
    }
  }
  uint32_t value() const { return hash_; }

 private:
  uint32_t hash_ = 2166136261u;
};

void probe_linear(const KernelTable& kernels, DType dtype, Inputs& inputs, Hash& hash) {
  constexpr int64_t rows = 3, k = 131, n = panel_columns, stride = 160;
  const std::vector<float> x = inputs.take(rows * k), w = inputs.take(n * k);
  WeightArena arena;
  const PackedWeight packed = pack_weight(arena, w.data(), n, k, dtype, Layout::panels);
  std::vector<float> y(rows * n), prepared(rows * stride);
  LinearCall call{x.data(), k, packed.data(), k, n, nullptr, y.data(), false};
  if (dtype == DType::bfloat16) {
    kernels.prepare_rows(x.data(), rows, k, prepared.data(), stride);
    call.x = prepared.data();
    call.x_stride = stride;
    kernels.linear_bfloat16(call, 0, 0, rows, 0, panel_columns / lane_count);
  } else {
    kernels.linear_float32(call, 0, 0, rows, 0, panel_columns / lane_count);
  }
  hash.add(y);
}

// latent: how much of a key is its value; 0 for values of their own.
void probe_attention(const KernelTable& kernels, int64_t window, float soft_cap, int64_t latent, Inputs& inputs, Hash& hash) {
  constexpr int64_t tokens = 37, heads = 2, dim = 24, block_size = 16;
  std::vector<float> keys = inputs.take(3 * dim * block_size), values = inputs.take(3 * dim * block_size), q = inputs.take(heads * dim),
                     y(heads * (latent > 0 ? latent : dim));
  const float sinks[] = {0.25f, -0.5f};
  const int32_t table[] = {2, 0, 1};
  ZeroedMemory scratch(kernels.attention_scratch_floats(1, heads, dim) * 4);
  AttentionCall call;
  call.q = q.data();
  call.y = y.data();
  call.kv = {keys.data(), values.data(), nullptr, nullptr, 1, dim, latent, block_size, DType::float32};
  call.block_table = table;
  call.heads = heads;
  call.kv_head = 0;
  call.first_position = tokens - 1;
  call.token_count = 1;
  call.scale = 0.01f;
  call.window = window;
  call.soft_cap = soft_cap;
  call.sinks = latent > 0 ? sinks : nullptr;
  call.scratch = scratch.floats();
  kernels.attention(call);
  hash.add(y);
}

}  // namespace

uint32_t numerics_probe(const KernelTable& kernels) {
  Inputs inputs;
  Hash hash;
  probe_linear(kernels, DType::float32, inputs, hash);
  probe_linear(kernels, DType::bfloat16, inputs, hash);
  probe_attention(kernels, 0, 0.0f, 0, inputs, hash);
  constexpr int64_t width = 77;
  const std::vector<float> x = inputs.take(2 * width), gain = inputs.take(width);
  std::vector<float> y(width);
  kernels.rms_norm({x.data(), gain.data(), y.data(), width, 1e-5f, 0.0f, false});
  hash.add(y);
  kernels.gated_silu(x.data(), width, y.data());
  hash.add(y);
  kernels.exp_of(x.data(), width, y.data());
  hash.add(y);
  std::vector<uint32_t> ids(width);
  for (int64_t i = 0; i < width; ++i) ids[static_cast<size_t>(i)] = static_cast<uint32_t>(i * 641);
  kernels.gumbel_of(ids.data(), width, 0x9e3779b97f4a7c15u, 1000, y.data());
  hash.add(y);
  for (int64_t i = 0; i < width; ++i) y[static_cast<size_t>(i)] = static_cast<float>(sine_cosine(static_cast<double>(i * i * i)).sine);
  hash.add(y);
  probe_attention(kernels, 20, 3.0f, 0, inputs, hash);
  kernels.gated_gelu_tanh(x.data(), width, y.data());
  hash.add(y);
  kernels.soft_cap(x.data(), 2.0f, width, y.data());
  hash.add(y);
  probe_attention(kernels, 0, 0.0f, 19, inputs, hash);
  kernels.gated_clamped_silu(x.data(), width, y.data());
  hash.add(y);
  return hash.value();
}

}  // namespace lockstep
