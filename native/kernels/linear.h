// Matrix products on packed panels. One chain of multiply-adds over K for each output element, in the same order whether the tile
// has one row or rows_tile_max, one group of 16 columns or four: that, and nothing else, is why a row's result cannot depend on its batch.
//
// The including file defines rows_tile_max, groups_tile (16-column groups at once) and, where the machine multiplies
// bfloat16 pairs, LOCKSTEP_BFLOAT16_PRODUCTS.

LOCKSTEP_INLINE void finish_group(const LinearCall& call, float* y, int64_t column, F32x16 sum) {
  const int64_t count = call.n - column;
  if (count >= lane_count) {
    if (call.bias) sum = sum + load(call.bias + column);
    if (call.accumulate) sum = load(y + column) + sum;
    store(y + column, sum);
  } else if (count > 0) {
    if (call.bias) sum = sum + load_part(call.bias + column, count);
    if (call.accumulate) sum = load_part(y + column, count) + sum;
    store_part(y + column, sum, count);
  }
}

struct Float32Products {
  using Element = float;
  static constexpr int64_t step_bytes = panel_columns * sizeof(float);
  static int64_t steps(int64_t k) { return k; }

  template <int R, int G>
  LOCKSTEP_INLINE void sum(const float* x, int64_t x_stride, const char* weights, int64_t steps, F32x16 (&sums)[R][G]) {
    for (int64_t step = 0; step < steps; ++step) {
      F32x16 w[G];
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) w[g] = load(reinterpret_cast<const float*>(weights + step * step_bytes) + g * lane_count);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F32x16 a = broadcast(x[r * x_stride + step]);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sums[r][g] = multiply_add(a, w[g], sums[r][g]);
      }
    }
  }
};

#ifdef LOCKSTEP_BFLOAT16_PRODUCTS
// Pairs of bfloat16: a lane's sum takes both products of a pair in the order that the instruction defines.
struct BFloat16Products {
  using Element = uint16_t;
  static constexpr int64_t step_bytes = panel_columns * 2 * sizeof(uint16_t);
  static int64_t steps(int64_t k) { return (k + 1) / 2; }

  template <int R, int G>
  LOCKSTEP_INLINE void sum(const uint16_t* x, int64_t x_stride, const char* weights, int64_t steps, F32x16 (&sums)[R][G]) {
    for (int64_t step = 0; step < steps; ++step) {
      __m512bh w[G];
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) w[g] = (__m512bh)_mm512_loadu_si512(weights + step * step_bytes + g * 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        __builtin_memcpy(&pair, x + r * x_stride + 2 * step, sizeof pair);
        const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sums[r][g] = (F32x16)_mm512_dpbf16_ps((__m512)sums[r][g], a, w[g]);
      }
    }
  }
};
#else
// The same panels on a machine without bfloat16 products: rows are floats that hold bfloat16 values, weights are widened. A product
// of two bfloat16 values is exact in float32, so fused or not gives the same bits.
struct BFloat16Products {
  using Element = float;
  static constexpr int64_t step_bytes = panel_columns * 2 * sizeof(uint16_t);
  static int64_t steps(int64_t k) { return (k + 1) / 2; }

  template <int R, int G>
  LOCKSTEP_INLINE void sum(const float* x, int64_t x_stride, const char* weights, int64_t steps, F32x16 (&sums)[R][G]) {
    for (int64_t step = 0; step < steps; ++step) {
      F32x16 even[G], odd[G];
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        U32x16 pairs;
        __builtin_memcpy(&pairs, weights + step * step_bytes + g * 64, sizeof pairs);
        even[g] = as_float(pairs << 16);
        odd[g] = as_float(pairs & 0xffff0000u);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F32x16 a = broadcast(x[r * x_stride + 2 * step]), b = broadcast(x[r * x_stride + 2 * step + 1]);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sums[r][g] = multiply_add(b, odd[g], multiply_add(a, even[g], sums[r][g]));
      }
    }
  }
};
#endif

template <class Products, int R, int G>
static __attribute__((noinline)) void linear_tile(const LinearCall& call, int64_t panel, int64_t row, int64_t group) {
  const int64_t steps = Products::steps(call.k);
  const char* weights = static_cast<const char*>(call.panels) + panel * steps * Products::step_bytes + group * (Products::step_bytes / 4);
  const auto* x = static_cast<const typename Products::Element*>(call.x) + row * call.x_stride;
  F32x16 sums[R][G];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) sums[r][g] = broadcast(0.0f);
  }
  Products::template sum<R, G>(x, call.x_stride, weights, steps, sums);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) finish_group(call, call.y + (row + r) * call.n, panel * panel_columns + (group + g) * lane_count, sums[r][g]);
  }
}

template <class Products, int G>
static void linear_rows(const LinearCall& call, int64_t panel, int64_t row_begin, int64_t row_end, int64_t group) {
  using Tile = void (*)(const LinearCall&, int64_t, int64_t, int64_t);
  static constexpr Tile tiles[6] = {linear_tile<Products, 1, G>,
                                    linear_tile<Products, 2, G>,
                                    linear_tile<Products, (rows_tile_max < 3 ? 1 : 3), G>,
                                    linear_tile<Products, (rows_tile_max < 4 ? 1 : 4), G>,
                                    linear_tile<Products, (rows_tile_max < 5 ? 1 : 5), G>,
                                    linear_tile<Products, (rows_tile_max < 6 ? 1 : 6), G>};
  for (int64_t row = row_begin; row < row_end;) {
    const int64_t left = row_end - row;
    const int64_t rows = left < rows_tile_max ? left : rows_tile_max;
    tiles[rows - 1](call, panel, row, group);
    row += rows;
  }
}

template <class Products>
static void linear(const LinearCall& call, int64_t panel, int64_t row_begin, int64_t row_end, int64_t group_begin, int64_t group_end) {
  int64_t group = group_begin;
  for (; group + groups_tile <= group_end; group += groups_tile) linear_rows<Products, groups_tile>(call, panel, row_begin, row_end, group);
  if constexpr (groups_tile > 2) {
    for (; group + 2 <= group_end; group += 2) linear_rows<Products, 2>(call, panel, row_begin, row_end, group);
  }
  for (; group < group_end; ++group) linear_rows<Products, 1>(call, panel, row_begin, row_end, group);
}

static void prepare_rows(const float* x, int64_t rows, int64_t k, void* prepared, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = x + r * k;
#ifdef LOCKSTEP_BFLOAT16_PRODUCTS
    auto* to = static_cast<uint16_t*>(prepared) + r * stride;
#else
    auto* to = static_cast<float*>(prepared) + r * stride;
#endif
    for (int64_t i = 0; i < stride; i += lane_count) {
      const int64_t count = k - i;
      const U32x16 bits = round_bits(count >= lane_count ? load(from + i) : count > 0 ? load_part(from + i, count) : broadcast(0.0f));
#ifdef LOCKSTEP_BFLOAT16_PRODUCTS
      const U16x16 halves = __builtin_convertvector(bits, U16x16);
      __builtin_memcpy(to + i, &halves, sizeof halves);
#else
      store(to + i, as_float(bits << 16));
#endif
    }
  }
}
