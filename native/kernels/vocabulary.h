// Passes over one row of logits for the sampler. Each walks the vocabulary in one fixed order; what is kept is decided by the caller.

LOCKSTEP_INLINE F32x16 load_logits(const float* logits, int64_t i, int64_t n, float fill) {
  return i + lane_count <= n ? load(logits + i) : load_part(logits + i, n - i, fill);
}

static LogitScan scan_logits(const float* logits, int64_t n) {
  F32x16 largest = broadcast(-__builtin_inff());
  I32x16 unordered = {};
  for (int64_t i = 0; i < n; i += lane_count) {
    const F32x16 v = load_logits(logits, i, n, -__builtin_inff());
    unordered |= v != v;
    largest = v > largest ? v : largest;
  }
  LogitScan scan{largest_lane(largest), 0, false};
  for (int lane = 0; lane < lane_count; ++lane) scan.has_nan = scan.has_nan || unordered[lane] != 0;
  while (scan.argmax < n - 1 && logits[scan.argmax] != scan.largest) ++scan.argmax;
  return scan;
}

static double exp_shifted(const float* logits, int64_t n, float scale, float largest, float* out) {
  F64x16 sums = {};
  for (int64_t i = 0; i < n; i += lane_count) {
    const F32x16 e = exponential(load_logits(logits, i, n, -__builtin_inff()) * scale - largest);
    sums = sums + __builtin_convertvector(e, F64x16);
    if (i + lane_count <= n) {
      store(out + i, e);
    } else {
      store_part(out + i, e, n - i);
    }
  }
  double total = 0.0;
  for (int lane = 0; lane < lane_count; ++lane) total += sums[lane];
  return total;
}

static void group_maxima(const float* logits, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += lane_count) *out++ = largest_lane(load_logits(logits, i, n, -__builtin_inff()));
}

static const U32x16 lane_ids = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Noise is computed only where it could win. Since -log(u) >= 1 - u, l + gumbel >= best asks for 1 - u <= exp(l - best), and
// exp(l - best) is the id's weight times one factor; a margin far above the rounding of these few operations keeps every tie in.
LOCKSTEP_INLINE float reach_of(float largest, float best) {
  const float magnitude = (largest < 0 ? -largest : largest) + (best < 0 ? -best : best);
  return exponential(broadcast(largest - best + 0.01f + 1e-6f * magnitude))[0];
}

static int64_t gumbel_argmax(const GumbelCall& call) {
  const F32x16 start = gumbel(broadcast_u32(static_cast<uint32_t>(call.first)), call.seed, call.position);
  float best = call.logits[call.first] * call.scale + start[0];
  float reach = reach_of(call.largest, best);
  int64_t winner = call.first;
  for (int64_t i = 0; i < call.n; i += lane_count) {
    const F32x16 weights = load_logits(call.weights, i, call.n, -1.0f);
    const F32x16 allowed = weights * reach;
    if (largest_lane(allowed) < 0x1p-25f) continue;
    const U32x16 words = philox_first_words(lane_ids + static_cast<uint32_t>(i), call.seed, call.position) >> 8;
    const F32x16 missing = __builtin_convertvector((I32x16)((1u << 25) - (words + words + 1u)), F32x16) * 0x1p-25f;  // 1 - u
    if (largest_lane(allowed - missing) < 0.0f) continue;
    const F32x16 noise = -logarithm(-logarithm_of_unit(words));
    const F32x16 l = load_logits(call.logits, i, call.n, -__builtin_inff()) * call.scale;
    const F32x16 score = weights >= broadcast(call.threshold) ? l + noise : broadcast(-__builtin_inff());
    for (int lane = 0; lane < lane_count; ++lane) {
      if (score[lane] > best || (score[lane] == best && i + lane < winner)) {
        best = score[lane];
        winner = i + lane;
        reach = reach_of(call.largest, best);
      }
    }
  }
  return winner;
}

static void gumbel_of(const uint32_t* ids, int64_t count, uint64_t seed, uint32_t position, float* out) {
  for (int64_t i = 0; i < count; i += lane_count) {
    const int64_t part = count - i < lane_count ? count - i : lane_count;
    U32x16 v = {};
    __builtin_memcpy(&v, ids + i, static_cast<size_t>(part) * sizeof(uint32_t));
    store_part(out + i, gumbel(v, seed, position), part);
  }
}

static void exp_of(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += lane_count) {
    const int64_t part = count - i;
    if (part >= lane_count) {
      store(out + i, exponential(load(x + i)));
    } else {
      store_part(out + i, exponential(load_part(x + i, part)), part);
    }
  }
}

static void log_of(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += lane_count) {
    const int64_t part = count - i < lane_count ? count - i : lane_count;
    store_part(out + i, logarithm(load_part(x + i, part, 1.0f)), part);
  }
}

static void tanh_of(const float* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += lane_count) {
    const int64_t part = count - i < lane_count ? count - i : lane_count;
    store_first(out + i, hyperbolic_tangent(load_first(x + i, part)), part);
  }
}

static void log_of_unit(const uint32_t* w, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += lane_count) {
    const int64_t part = count - i < lane_count ? count - i : lane_count;
    U32x16 v = {};
    __builtin_memcpy(&v, w + i, static_cast<size_t>(part) * sizeof(uint32_t));
    store_part(out + i, logarithm_of_unit(v), part);
  }
}
