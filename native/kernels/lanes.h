// Sixteen floats as one value, in the compiler's vector types: the unit that every kernel is written in.
//
// Included by each instruction set's file inside its own anonymous namespace, so no function here has a symbol that the linker
// could hand to another instruction set. Knows what the machine adds (fused multiply-add); every other operation rounds
// as IEEE says, and the build forbids contraction, so a lane's bits do not depend on which lane it is, nor on the tile around it.
// LOCKSTEP_FUSED_512 or _256 is defined by the including file where multiply_add is one instruction with one rounding.

#define LOCKSTEP_INLINE static inline __attribute__((always_inline))

typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef double F64x16 __attribute__((vector_size(128)));
typedef float F32x8 __attribute__((vector_size(32)));
typedef float F32x4 __attribute__((vector_size(16)));

LOCKSTEP_INLINE F32x16 broadcast(float s) { return F32x16{s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s}; }
LOCKSTEP_INLINE U32x16 broadcast_u32(uint32_t s) { return U32x16{s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s}; }

LOCKSTEP_INLINE F32x16 load(const float* p) {
  F32x16 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
LOCKSTEP_INLINE void store(float* p, F32x16 v) { __builtin_memcpy(p, &v, sizeof v); }

// The first `count` lanes from p, the others `fill`. Reads nothing beyond p[count - 1].
LOCKSTEP_INLINE F32x16 load_part(const float* p, int64_t count, float fill = 0.0f) {
  F32x16 v = broadcast(fill);
  __builtin_memcpy(&v, p, static_cast<size_t>(count) * sizeof(float));
  return v;
}
LOCKSTEP_INLINE void store_part(float* p, F32x16 v, int64_t count) { __builtin_memcpy(p, &v, static_cast<size_t>(count) * sizeof(float)); }

// The first `count` of at most a vector's lanes: what the two pairs above do, by the count.
LOCKSTEP_INLINE F32x16 load_first(const float* p, int64_t count) { return count == lane_count ? load(p) : load_part(p, count); }
LOCKSTEP_INLINE void store_first(float* p, F32x16 v, int64_t count) { return count == lane_count ? store(p, v) : store_part(p, v, count); }

// Bits kept, type changed (a cast between vector types of one size).
LOCKSTEP_INLINE F32x16 as_float(U32x16 v) { return (F32x16)v; }
LOCKSTEP_INLINE U32x16 as_bits(F32x16 v) { return (U32x16)v; }
LOCKSTEP_INLINE F32x16 larger(F32x16 a, F32x16 b) { return a > b ? a : b; }
LOCKSTEP_INLINE F32x16 smaller(F32x16 a, F32x16 b) { return a < b ? a : b; }

// a * b + c.
LOCKSTEP_INLINE F32x16 multiply_add(F32x16 a, F32x16 b, F32x16 c) {
#if defined(LOCKSTEP_FUSED_512)
  return (F32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(LOCKSTEP_FUSED_256)
  __m256 a_half[2], b_half[2], c_half[2];
  __builtin_memcpy(a_half, &a, 64);
  __builtin_memcpy(b_half, &b, 64);
  __builtin_memcpy(c_half, &c, 64);
  c_half[0] = _mm256_fmadd_ps(a_half[0], b_half[0], c_half[0]);
  c_half[1] = _mm256_fmadd_ps(a_half[1], b_half[1], c_half[1]);
  F32x16 result;
  __builtin_memcpy(&result, c_half, 64);
  return result;
#else
  return a * b + c;
#endif
}

// Bfloat16 to float, exact.
LOCKSTEP_INLINE F32x16 widen(const uint16_t* p) {
  U16x16 v;
  __builtin_memcpy(&v, p, sizeof v);
  return as_float(__builtin_convertvector(v, U32x16) << 16);
}
LOCKSTEP_INLINE float widen_one(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Float to bfloat16, to nearest even; a NaN stays one (made quiet). The result is in the low half of each lane.
LOCKSTEP_INLINE U32x16 round_bits(F32x16 v) {
  const U32x16 bits = as_bits(v);
  const U32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U32x16 quiet = (bits >> 16) | 0x40u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
}
LOCKSTEP_INLINE uint16_t round_one(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Reductions over the lanes, halving: (i, i + 8), (i, i + 4), ...
LOCKSTEP_INLINE float sum_lanes(F32x16 v) {
  F32x8 halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  const F32x8 eight = halves[0] + halves[1];
  F32x4 quarters[2];
  __builtin_memcpy(quarters, &eight, sizeof eight);
  const F32x4 four = quarters[0] + quarters[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}
LOCKSTEP_INLINE float largest_lane(F32x16 v) {
  F32x8 halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  const F32x8 eight = halves[0] > halves[1] ? halves[0] : halves[1];
  F32x4 quarters[2];
  __builtin_memcpy(quarters, &eight, sizeof eight);
  const F32x4 four = quarters[0] > quarters[1] ? quarters[0] : quarters[1];
  const float even = four[0] > four[2] ? four[0] : four[2];
  const float odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
}
