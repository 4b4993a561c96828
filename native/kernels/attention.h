// Causal attention over a paged cache, by online softmax over tiles of 32 keys at fixed absolute positions.
//
// A query is one (token, head). Its arithmetic is fixed by its position alone: tiles 0 .. position / 32 in order; in each a chain over head_dim
// a key, the tile's largest score, the rescaling, a chain over the tile's visible keys for every output element. Which queries share a
// tile's widened keys and values, and how many go through the registers at once, changes none of that. Keys beyond a query's
// position never enter its chains (a later token's values may hold anything), nor do those before its window: tiles that lie
// outside it are left out, and no position that no query of the call sees is read.

constexpr int64_t queries_tile = rows_tile_max;

struct Scratch {
  float* keys;     // [head_dim][32]
  float* values;   // [32][padded], as wide as values are
  float* q;        // [queries][head_dim], scaled
  float* scores;   // [queries][32]
  float* sums;     // [queries][padded]
  float* largest;  // [queries]
  float* totals;   // [queries]
};

LOCKSTEP_INLINE int64_t value_dim(const KVView& kv) { return kv.latent > 0 ? kv.latent : kv.head_dim; }

LOCKSTEP_INLINE int64_t padded_dim(int64_t head_dim) { return (head_dim + lane_count - 1) / lane_count * lane_count; }

static int64_t attention_scratch_floats(int64_t token_count, int64_t group, int64_t head_dim) {
  const int64_t padded = padded_dim(head_dim), queries = (token_count * group + lane_count - 1) / lane_count * lane_count;
  return padded * tile_keys * 2 + queries * (padded * 2 + tile_keys + 2);
}

LOCKSTEP_INLINE Scratch divide(const AttentionCall& call, int64_t group) {
  const int64_t padded = padded_dim(call.kv.head_dim), queries = (call.token_count * group + lane_count - 1) / lane_count * lane_count;
  Scratch s;
  s.keys = call.scratch;
  s.values = s.keys + padded * tile_keys;
  s.q = s.values + padded * tile_keys;
  s.sums = s.q + queries * padded;
  s.scores = s.sums + queries * padded;
  s.largest = s.scores + queries * tile_keys;
  s.totals = s.largest + queries;
  return s;
}

// The first position that a query at `position` sees.
LOCKSTEP_INLINE int64_t first_seen(const AttentionCall& call, int64_t position) {
  return call.window > 0 && position >= call.window ? position + 1 - call.window : 0;
}

// Keys [begin, end) of a tile.
struct VisibleKeys {
  int64_t begin;
  int64_t end;
  bool whole() const { return begin == 0 && end == tile_keys; }
};

// What token `token` of the call sees of the tile at `first`, which begins no later than the token's own position.
LOCKSTEP_INLINE VisibleKeys visible_keys(const AttentionCall& call, int64_t token, int64_t first) {
  const int64_t position = call.first_position + token, seen = first_seen(call, position);
  return {seen > first ? seen - first : 0, position + 1 - first < tile_keys ? position + 1 - first : tile_keys};
}

LOCKSTEP_INLINE F32x16 widen_any(const float* p) { return load(p); }
LOCKSTEP_INLINE F32x16 widen_any(const uint16_t* p) { return widen(p); }
LOCKSTEP_INLINE F32x16 widen_any(const int8_t* p) {
  typedef int8_t I8x16 __attribute__((vector_size(16)));
  I8x16 v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, F32x16);
}
LOCKSTEP_INLINE float widen_any_one(float v) { return v; }
LOCKSTEP_INLINE float widen_any_one(int8_t v) { return static_cast<float>(v); }
LOCKSTEP_INLINE float widen_any_one(uint16_t v) { return widen_one(v); }

// Keys [first + skip, first + count) of the tile at `first` into scratch, the rest zero; 0 <= skip < count.
template <class Element>
static void gather_tile(const AttentionCall& call, const Scratch& s, int64_t first, int64_t skip, int64_t count) {
  const KVView& kv = call.kv;
  constexpr bool scaled = sizeof(Element) == 1;
  const int64_t dim = kv.head_dim, padded = padded_dim(dim), size = kv.block_size;
  const auto* all_keys = static_cast<const Element*>(kv.keys);
  const auto* all_values = static_cast<const Element*>(kv.values);
  const auto head_of = [&](int64_t position) { return (call.block_table[position / size] * kv.kv_heads + call.kv_head) * dim * size; };
  const auto scale_at = [&](int64_t position) {
    return (call.block_table[position / size] * kv.kv_heads + call.kv_head) * size + position % size;
  };
  for (int64_t half = 0; half < tile_keys; half += lane_count) {
    if (size % lane_count == 0 && half < count && half >= skip) {
      const Element* keys = all_keys + head_of(first + half) + (first + half) % size;
      const int64_t visible = count - half;
      const F32x16 scales = scaled ? load(kv.key_scales + scale_at(first + half)) : broadcast(1.0f);
      const F32x16 limit = broadcast(static_cast<float>(visible < lane_count ? visible : lane_count));
      const F32x16 index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      for (int64_t d = 0; d < dim; ++d) {
        F32x16 key = widen_any(keys + d * size);
        if (scaled) key = key * scales;
        store(s.keys + d * tile_keys + half, visible >= lane_count ? key : index < limit ? key : broadcast(0.0f));
      }
      continue;
    }
    for (int64_t j = half; j < half + lane_count; ++j) {
      if (j >= count || j < skip) {
        for (int64_t d = 0; d < dim; ++d) s.keys[d * tile_keys + j] = 0.0f;
        continue;
      }
      const Element* key = all_keys + head_of(first + j) + (first + j) % size;
      const float scale = scaled ? kv.key_scales[scale_at(first + j)] : 1.0f;
      for (int64_t d = 0; d < dim; ++d) s.keys[d * tile_keys + j] = scaled ? widen_any_one(key[d * size]) * scale : widen_any_one(key[d * size]);
    }
  }
  if (kv.latent > 0) {
    const int64_t width = kv.latent, padded_width = padded_dim(width);
    const float* from = s.keys + (dim - width) * tile_keys;
    for (int64_t j = skip; j < count; ++j) {
      float* to = s.values + j * padded_width;
      for (int64_t d = 0; d < padded_width; ++d) to[d] = d < width ? from[d * tile_keys + j] : 0.0f;
    }
    return;
  }
  for (int64_t j = skip; j < count; ++j) {
    const Element* value = all_values + head_of(first + j) + ((first + j) % size) * dim;
    float* to = s.values + j * padded;
    const float scale = scaled ? kv.value_scales[scale_at(first + j)] : 1.0f;
    int64_t d = 0;
    for (; d + lane_count <= dim; d += lane_count) store(to + d, scaled ? widen_any(value + d) * scale : widen_any(value + d));
    for (; d < padded; ++d) to[d] = d >= dim ? 0.0f : scaled ? widen_any_one(value[d]) * scale : widen_any_one(value[d]);
  }
}

template <int Q>
static void score_tile(const Scratch& s, int64_t query, int64_t dim) {
  F32x16 sums[Q][2];
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i) sums[i][0] = sums[i][1] = broadcast(0.0f);
  const float* q = s.q + query * dim;
  for (int64_t d = 0; d < dim; ++d) {
    const F32x16 low = load(s.keys + d * tile_keys), high = load(s.keys + d * tile_keys + lane_count);
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) {
      const F32x16 a = broadcast(q[i * dim + d]);
      sums[i][0] = multiply_add(a, low, sums[i][0]);
      sums[i][1] = multiply_add(a, high, sums[i][1]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i) {
    store(s.scores + (query + i) * tile_keys, sums[i][0]);
    store(s.scores + (query + i) * tile_keys + lane_count, sums[i][1]);
  }
}

// Scores of one query to weights exp(score - largest so far), zero outside the visible keys; rescales its totals and sums.
static void weigh_tile(const Scratch& s, int64_t query, VisibleKeys visible, float cap, int64_t padded) {
  float* scores = s.scores + query * tile_keys;
  const F32x16 index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F32x16 minus_infinity = broadcast(-__builtin_inff());
  F32x16 low = load(scores), high = load(scores + lane_count);
  if (cap > 0.0f) {
    low = hyperbolic_tangent(low / cap) * cap;
    high = hyperbolic_tangent(high / cap) * cap;
  }
  if (visible.end < tile_keys) {
    low = index < broadcast(static_cast<float>(visible.end)) ? low : minus_infinity;
    high = index < broadcast(static_cast<float>(visible.end - lane_count)) ? high : minus_infinity;
  }
  if (visible.begin > 0) {
    low = index < broadcast(static_cast<float>(visible.begin)) ? minus_infinity : low;
    high = index < broadcast(static_cast<float>(visible.begin - lane_count)) ? minus_infinity : high;
  }
  const float tile_largest = largest_lane(larger(low, high));
  const float before = s.largest[query];
  const float largest = tile_largest > before ? tile_largest : before;
  const F32x16 correction = exponential(broadcast(before - largest));
  low = exponential(low - largest);
  high = exponential(high - largest);
  store(scores, low);
  store(scores + lane_count, high);
  s.largest[query] = largest;
  s.totals[query] = s.totals[query] * correction[0] + sum_lanes(low + high);
  float* sums = s.sums + query * padded;
  for (int64_t d = 0; d < padded; d += lane_count) store(sums + d, load(sums + d) * correction);
}

template <int Q, int G>
static void value_tile(const Scratch& s, int64_t query, VisibleKeys visible, int64_t padded, int64_t column) {
  F32x16 sums[Q][G];
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) sums[i][g] = load(s.sums + (query + i) * padded + column + g * lane_count);
  }
  for (int64_t j = visible.begin; j < visible.end; ++j) {
    F32x16 v[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) v[g] = load(s.values + j * padded + column + g * lane_count);
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) {
      const F32x16 weight = broadcast(s.scores[(query + i) * tile_keys + j]);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[i][g] = multiply_add(weight, v[g], sums[i][g]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) store(s.sums + (query + i) * padded + column + g * lane_count, sums[i][g]);
  }
}

template <int Q>
LOCKSTEP_INLINE void add_values(const Scratch& s, int64_t query, VisibleKeys visible, int64_t padded) {
  int64_t column = 0;
  for (; column + groups_tile * lane_count <= padded; column += groups_tile * lane_count)
    value_tile<Q, groups_tile>(s, query, visible, padded, column);
  for (; column < padded; column += lane_count) value_tile<Q, 1>(s, query, visible, padded, column);
}

// The queries of tokens [token, token_end) against the tile in scratch, of which all see the same keys.
static void attend_tile(const AttentionCall& call, const Scratch& s, int64_t token, int64_t token_end, VisibleKeys visible) {
  const int64_t dim = call.kv.head_dim, padded = padded_dim(value_dim(call.kv)), group = call.heads / call.kv.kv_heads;
  const int64_t begin = token * group, end = token_end * group;
  int64_t query = begin;
  for (; query + queries_tile <= end; query += queries_tile) score_tile<queries_tile>(s, query, dim);
  for (; query + 3 <= end; query += 3) score_tile<3>(s, query, dim);
  for (; query < end; ++query) score_tile<1>(s, query, dim);
  for (query = begin; query < end; ++query) weigh_tile(s, query, visible, call.soft_cap, padded);
  query = begin;
  for (; query + queries_tile <= end; query += queries_tile) add_values<queries_tile>(s, query, visible, padded);
  for (; query + 3 <= end; query += 3) add_values<3>(s, query, visible, padded);
  for (; query < end; ++query) add_values<1>(s, query, visible, padded);
}

static void attention(const AttentionCall& call) {
  const int64_t dim = call.kv.head_dim, width = value_dim(call.kv), padded = padded_dim(width), group = call.heads / call.kv.kv_heads;
  const int64_t row = call.heads * dim, first_head = call.kv_head * group;
  const Scratch s = divide(call, group);
  const int64_t queries = call.token_count * group;
  for (int64_t query = 0; query < queries; ++query) {
    const float* q = call.q + (query / group) * row + (first_head + query % group) * dim;
    for (int64_t d = 0; d < dim; ++d) s.q[query * dim + d] = q[d] * call.scale;
    for (int64_t d = 0; d < padded; ++d) s.sums[query * padded + d] = 0.0f;
    // A sink comes before every tile: it is the largest score so far, with weight 1 and no value.
    s.largest[query] = call.sinks ? call.sinks[first_head + query % group] : -__builtin_inff();
    s.totals[query] = call.sinks ? 1.0f : 0.0f;
  }
  const int64_t last = call.first_position + call.token_count - 1, seen_first = first_seen(call, call.first_position);
  for (int64_t first = seen_first / tile_keys * tile_keys; first <= last; first += tile_keys) {
    const int64_t skip = seen_first > first ? seen_first - first : 0;
    const int64_t present = last + 1 - first < tile_keys ? last + 1 - first : tile_keys;
    if (call.kv.dtype == DType::int8) {
      gather_tile<int8_t>(call, s, first, skip, present);
    } else if (call.kv.dtype == DType::bfloat16) {
      gather_tile<uint16_t>(call, s, first, skip, present);
    } else {
      gather_tile<float>(call, s, first, skip, present);
    }
    // Tokens that see the whole tile together, those that see part of it one at a time; the rest see none of it, the later ones since their
    // windows have moved past it.
    for (int64_t token = first > call.first_position ? first - call.first_position : 0; token < call.token_count;) {
      const VisibleKeys visible = visible_keys(call, token, first);
      if (visible.begin >= tile_keys) break;
      int64_t end = token + 1;
      while (visible.whole() && end < call.token_count && visible_keys(call, end, first).whole()) ++end;
      attend_tile(call, s, token, end, visible);
      token = end;
    }
  }
  for (int64_t query = 0; query < queries; ++query) {
    float* y = call.y + ((query / group) * call.heads + first_head + query % group) * width;
    for (int64_t d = 0; d < width; ++d) y[d] = s.sums[query * padded + d] / s.totals[query];
  }
}
