// Ops on one token's row: RMS norm, gated activations, soft cap, rotation and the KV write. Nothing here looks at another row.

static void rms_norm(const NormCall& call) {
  const float* x = call.x;
  const int64_t width = call.width;
  F32x16 squares = broadcast(0.0f);
  int64_t i = 0;
  for (; i + lane_count <= width; i += lane_count) {
    const F32x16 v = load(x + i);
    squares = multiply_add(v, v, squares);
  }
  if (i < width) {
    const F32x16 v = load_part(x + i, width - i);
    squares = multiply_add(v, v, squares);
  }
  const F32x16 factor = broadcast(1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(width) + call.eps));
  for (i = 0; i < width; i += lane_count) {
    const int64_t count = width - i < lane_count ? width - i : lane_count;
    F32x16 gain = load_first(call.gain + i, count);
    if (call.offset != 0.0f) gain = gain + call.offset;
    F32x16 y = load_first(x + i, count) * factor * gain;
    if (call.accumulate) y = load_first(call.y + i, count) + y;
    store_first(call.y + i, y, count);
  }
}

LOCKSTEP_INLINE F32x16 silu(F32x16 gate) { return gate / (exponential(-gate) + 1.0f); }

static void gated_silu(const float* gate_up, int64_t width, float* y) {
  const float* up = gate_up + width;
  int64_t i = 0;
  for (; i + lane_count <= width; i += lane_count) store(y + i, silu(load(gate_up + i)) * load(up + i));
  if (i < width) store_part(y + i, silu(load_part(gate_up + i, width - i)) * load_part(up + i, width - i), width - i);
}

// (1 + tanh z) / 2 is 1 / (1 + e^-2z), without the cancellation of the former at z far below zero.
LOCKSTEP_INLINE F32x16 gelu_tanh(F32x16 gate) {
  const F32x16 z = (gate + gate * gate * gate * 0.044715f) * 0.7978845608028654f;  // sqrt(2 / pi)
  return gate / (exponential(-(z + z)) + 1.0f);
}

static void gated_gelu_tanh(const float* gate_up, int64_t width, float* y) {
  const float* up = gate_up + width;
  for (int64_t i = 0; i < width; i += lane_count) {
    const int64_t count = width - i < lane_count ? width - i : lane_count;
    store_first(y + i, gelu_tanh(load_first(gate_up + i, count)) * load_first(up + i, count), count);
  }
}

// The gate is cut at 7 from above, `up` at 7 from both sides; not-a-number stays what it is.
static void gated_clamped_silu(const float* gate_up, int64_t width, float* y) {
  const float* up = gate_up + width;
  const F32x16 limit = broadcast(7.0f);
  for (int64_t i = 0; i < width; i += lane_count) {
    const int64_t count = width - i < lane_count ? width - i : lane_count;
    F32x16 gate = load_first(gate_up + i, count), other = load_first(up + i, count);
    gate = gate > limit ? limit : gate;
    other = other > limit ? limit : other < -limit ? -limit : other;
    store_first(y + i, gate / (exponential(-(gate * 1.702f)) + 1.0f) * (other + 1.0f), count);
  }
}

static void soft_cap(const float* x, float cap, int64_t width, float* y) {
  for (int64_t i = 0; i < width; i += lane_count) {
    const int64_t count = width - i < lane_count ? width - i : lane_count;
    store_first(y + i, hyperbolic_tangent(load_first(x + i, count) / cap) * cap, count);
  }
}

static void scale(float factor, int64_t width, float* y) {
  for (int64_t i = 0; i < width; i += lane_count) {
    const int64_t count = width - i < lane_count ? width - i : lane_count;
    store_first(y + i, load_first(y + i, count) * factor, count);
  }
}

// (a, b) -> (a cos - b sin, b cos + a sin) for the pairs (i, i + half). Each product is rounded before the sum.
LOCKSTEP_INLINE void rotate(const float* from, const float* cosines, const float* sines, int64_t half, float* to) {
  int64_t i = 0;
  for (; i + lane_count <= half; i += lane_count) {
    const F32x16 a = load(from + i), b = load(from + half + i), c = load(cosines + i), s = load(sines + i);
    store(to + i, a * c - b * s);
    store(to + half + i, b * c + a * s);
  }
  if (i < half) {
    const int64_t count = half - i;
    const F32x16 a = load_part(from + i, count), b = load_part(from + half + i, count);
    const F32x16 c = load_part(cosines + i, count), s = load_part(sines + i, count);
    store_part(to + i, a * c - b * s, count);
    store_part(to + half + i, b * c + a * s, count);
  }
}

LOCKSTEP_INLINE void put(float* to, float value) { *to = value; }
LOCKSTEP_INLINE void put(uint16_t* to, float value) { *to = round_one(value); }

// The scale of a vector whose integers are its values over it, to nearest even, from -127 to 127. What is not finite makes the scale not a number,
// so that nothing can be read out of it.
LOCKSTEP_INLINE float scale_of(const float* values, int64_t count) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float size = __builtin_fabsf(values[i]);
    if (!(size <= __FLT_MAX__)) return __builtin_nanf("");
    largest = size > largest ? size : largest;
  }
  return largest / 127.0f;
}

LOCKSTEP_INLINE int8_t scaled_one(float value, float scale) {
  if (!(scale > 0.0f)) return scale == 0.0f ? 0 : 1;
  const float whole = __builtin_rintf(value / scale);
  return static_cast<int8_t>(whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole);
}

static void write_int8(const RopeCall& call, int64_t kv_head, const float* key, const float* value) {
  const KVView& kv = call.kv;
  const int64_t head = call.block * kv.kv_heads + kv_head, at = head * kv.block_size + call.offset;
  int8_t* keys = static_cast<int8_t*>(kv.keys) + head * kv.head_dim * kv.block_size + call.offset;
  const float scale = kv.key_scales[at] = scale_of(key, kv.head_dim);
  for (int64_t d = 0; d < kv.head_dim; ++d) keys[d * kv.block_size] = scaled_one(key[d], scale);
  if (kv.latent > 0) return;
  int8_t* values = static_cast<int8_t*>(kv.values) + (head * kv.block_size + call.offset) * kv.head_dim;
  const float value_scale = kv.value_scales[at] = scale_of(value, kv.head_dim);
  for (int64_t d = 0; d < kv.head_dim; ++d) values[d] = scaled_one(value[d], value_scale);
}

template <class Element>
static void write_kv(const RopeCall& call, int64_t kv_head, const float* key, const float* value) {
  const KVView& kv = call.kv;
  const int64_t head = (call.block * kv.kv_heads + kv_head) * kv.head_dim * kv.block_size;
  Element* keys = static_cast<Element*>(kv.keys) + head + call.offset;
  for (int64_t d = 0; d < kv.head_dim; ++d) put(keys + d * kv.block_size, key[d]);
  if (kv.latent > 0) return;
  Element* values = static_cast<Element*>(kv.values) + head + call.offset * kv.head_dim;
  for (int64_t d = 0; d < kv.head_dim; ++d) put(values + d, value[d]);
}

constexpr int64_t head_dim_max = 1024;  // the engine refuses more

// The first 2 * half values are turned, the rest of the head passes.
LOCKSTEP_INLINE void rotate_head(const RopeCall& call, const float* from, float* to) {
  rotate(from, call.cosines, call.sines, call.half, to);
  for (int64_t d = 2 * call.half; d < call.kv.head_dim; ++d) to[d] = from[d];
}

static void rope_write(const RopeCall& call) {
  const int64_t width = call.kv.head_dim;
  for (int64_t h = 0; h < call.heads; ++h) rotate_head(call, call.queries + h * width, call.q + h * width);
  float rotated[head_dim_max];
  for (int64_t h = 0; h < call.kv.kv_heads; ++h) {
    rotate_head(call, call.keys + h * width, rotated);
    if (call.kv.dtype == DType::int8) {
      write_int8(call, h, rotated, call.values + h * width);
    } else if (call.kv.dtype == DType::bfloat16) {
      write_kv<uint16_t>(call, h, rotated, call.values + h * width);
    } else {
      write_kv<float>(call, h, rotated, call.values + h * width);
    }
  }
}
