// Ops on one token's row: RMS norm, gated SiLU, rotation and the KV write. Nothing here looks at another row.

static void rms_norm(const float* x, const float* gain, float eps, int64_t width, float* y) {
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
  const F32x16 factor = broadcast(1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(width) + eps));
  for (i = 0; i + lane_count <= width; i += lane_count) store(y + i, load(x + i) * factor * load(gain + i));
  if (i < width) store_part(y + i, load_part(x + i, width - i) * factor * load_part(gain + i, width - i), width - i);
}

LOCKSTEP_INLINE F32x16 silu(F32x16 gate) { return gate / (exponential(-gate) + 1.0f); }

static void gated_silu(const float* gate_up, int64_t width, float* y) {
  const float* up = gate_up + width;
  int64_t i = 0;
  for (; i + lane_count <= width; i += lane_count) store(y + i, silu(load(gate_up + i)) * load(up + i));
  if (i < width) store_part(y + i, silu(load_part(gate_up + i, width - i)) * load_part(up + i, width - i), width - i);
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

template <class Element>
static void write_kv(const RopeCall& call, int64_t kv_head, const float* key, const float* value) {
  const KVView& kv = call.kv;
  const int64_t head = (call.block * kv.kv_heads + kv_head) * kv.head_dim * kv.block_size;
  Element* keys = static_cast<Element*>(kv.keys) + head + call.offset;
  Element* values = static_cast<Element*>(kv.values) + head + call.offset * kv.head_dim;
  for (int64_t d = 0; d < kv.head_dim; ++d) put(keys + d * kv.block_size, key[d]);
  for (int64_t d = 0; d < kv.head_dim; ++d) put(values + d, value[d]);
}

constexpr int64_t head_dim_max = 1024;  // the engine refuses more

static void rope_write(const RopeCall& call) {
  const int64_t width = call.kv.head_dim, half = width / 2;
  for (int64_t h = 0; h < call.heads; ++h) rotate(call.qkv + h * width, call.cosines, call.sines, half, call.q + h * width);
  const float* keys = call.qkv + call.heads * width;
  const float* values = keys + call.kv.kv_heads * width;
  float rotated[head_dim_max];
  for (int64_t h = 0; h < call.kv.kv_heads; ++h) {
    rotate(keys + h * width, call.cosines, call.sines, half, rotated);
    if (call.kv.dtype == DType::bfloat16) {
      write_kv<uint16_t>(call, h, rotated, values + h * width);
    } else {
      write_kv<float>(call, h, rotated, values + h * width);
    }
  }
}
