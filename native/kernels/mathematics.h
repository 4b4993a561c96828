// exp, log, tanh, Philox and Gumbel noise on sixteen lanes. Written for this engine; the polynomials were fitted by Chebyshev interpolation.
//
// A value's result does not depend on its lane or on its neighbours: callers pad tails to a full vector rather than
// switch to a scalar function. Largest relative errors: exp 2e-7, log 2e-7, tanh 4e-7 (tests bound them against float64).

constexpr float ln2_high = 0.693145751953125f;  // 16 bits, so that a small integer times it is exact
constexpr float ln2_low = 1.4286067653e-06f;

// e^x. NaN gives NaN, above 88.72283 infinity, below -86.6 zero (so no result is subnormal).
LOCKSTEP_INLINE F32x16 exponential(F32x16 x) {
  const F32x16 clamped = smaller(larger(x, broadcast(-88.0f)), broadcast(89.0f));
  const F32x16 shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const F32x16 shifted = multiply_add(clamped, broadcast(1.44269504f), shift);
  const F32x16 n = shifted - shift;
  F32x16 r = multiply_add(n, broadcast(-ln2_high), clamped);
  r = multiply_add(n, broadcast(-ln2_low), r);
  F32x16 p = broadcast(0.0013926181709393859f);
  p = multiply_add(p, r, broadcast(0.008363177999854088f));
  p = multiply_add(p, r, broadcast(0.041666556149721146f));
  p = multiply_add(p, r, broadcast(0.16666576266288757f));
  p = multiply_add(p, r, broadcast(0.5f));
  const F32x16 power = multiply_add(r * r, p, r) + 1.0f;
  // 2^(n - 1), then doubled, so that n = 128 stays a float. The low bits of `shifted` are n.
  const U32x16 exponent = (as_bits(shifted) - as_bits(shift) + 126u) << 23;
  F32x16 result = power * as_float(exponent) * 2.0f;
  result = x > broadcast(88.72283f) ? broadcast(__builtin_inff()) : result;
  result = x < broadcast(-86.6f) ? broadcast(0.0f) : result;
  return x == x ? result : x;
}

// Odd: the bits of tanh(-x) are those of tanh(x) but for the sign. Below 0.625 by a polynomial, since 1 - 2 / (e^2x + 1) cancels there.
LOCKSTEP_INLINE F32x16 hyperbolic_tangent(F32x16 x) {
  const U32x16 sign = as_bits(x) & 0x80000000u;
  const F32x16 size = as_float(as_bits(x) ^ sign);
  const F32x16 square = size * size;
  F32x16 p = broadcast(-0.006096714176237583f);
  p = multiply_add(p, square, broadcast(0.020997179672122f));
  p = multiply_add(p, square, broadcast(-0.05385090783238411f));
  p = multiply_add(p, square, broadcast(0.1333276927471161f));
  p = multiply_add(p, square, broadcast(-0.333333283662796f));
  const F32x16 small = multiply_add(size * square, p, size);
  const F32x16 large = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
  return as_float(as_bits(size < broadcast(0.625f) ? small : large) | sign);
}

// e ln 2 + ln(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1).
LOCKSTEP_INLINE F32x16 logarithm_of_parts(F32x16 e, F32x16 f) {
  F32x16 p = broadcast(-0.07900885492563248f);
  p = multiply_add(p, f, broadcast(0.12621887028217316f));
  p = multiply_add(p, f, broadcast(-0.1299852877855301f));
  p = multiply_add(p, f, broadcast(0.1421455442905426f));
  p = multiply_add(p, f, broadcast(-0.1664126217365265f));
  p = multiply_add(p, f, broadcast(0.20001043379306793f));
  p = multiply_add(p, f, broadcast(-0.25000306963920593f));
  p = multiply_add(p, f, broadcast(0.3333333134651184f));
  const F32x16 square = f * f;
  F32x16 tail = multiply_add(square * f, p, e * ln2_low);
  tail = multiply_add(square, broadcast(-0.5f), tail);
  return multiply_add(e, broadcast(ln2_high), tail + f);
}

struct LogarithmParts {
  F32x16 e;
  F32x16 f;
};

// x = 2^e (1 + f) for positive normal x.
LOCKSTEP_INLINE LogarithmParts parts_of(F32x16 x) {
  const U32x16 bits = as_bits(x);
  const I32x16 exponent = ((I32x16)bits - 0x3f3504f3) >> 23;  // 0x3f3504f3 is sqrt(1/2)
  const U32x16 mantissa = bits - ((U32x16)exponent << 23);
  return {__builtin_convertvector(exponent, F32x16), as_float(mantissa) - 1.0f};
}

// ln x for positive normal x.
LOCKSTEP_INLINE F32x16 logarithm(F32x16 x) {
  const LogarithmParts parts = parts_of(x);
  return logarithm_of_parts(parts.e, parts.f);
}

// ln((w + 0.5) * 2^-24) for integers w in [0, 2^24), as if from the exact argument: above one half that has 25 bits, and the largest would round to 1
// (and its noise be infinite), so there f is taken from the integer, which a float32 holds exactly.
LOCKSTEP_INLINE F32x16 logarithm_of_unit(U32x16 w) {
  const I32x16 odd = (I32x16)(w + w + 1u);  // the argument is odd * 2^-25
  const LogarithmParts small = parts_of(__builtin_convertvector(odd, F32x16) * 0x1p-25f);
  const F32x16 f_half = __builtin_convertvector(odd - (1 << 24), F32x16) * 0x1p-24f;
  const F32x16 f_one = __builtin_convertvector(odd - (1 << 25), F32x16) * 0x1p-25f;
  F32x16 e = small.e, f = small.f;
  const I32x16 from_half = odd >= (1 << 24), from_root = odd >= 23726567;  // sqrt(1/2) * 2^25
  e = from_root ? broadcast(0.0f) : from_half ? broadcast(-1.0f) : e;
  f = from_root ? f_one : from_half ? f_half : f;
  return logarithm_of_parts(e, f);
}

// First word of Philox4x32-10 (Salmon et al., SC 2011) for counters (position, id[lane], 0, 0), in the widest integers of the machine.
#if defined(LOCKSTEP_FUSED_512)
struct WideIntegers {
  using Vector = __m512i;
  static constexpr int count = 16;
  LOCKSTEP_INLINE Vector fill(uint32_t v) { return _mm512_set1_epi32(static_cast<int32_t>(v)); }
  LOCKSTEP_INLINE Vector exclusive_or(Vector a, Vector b) { return _mm512_xor_si512(a, b); }
  LOCKSTEP_INLINE void multiply(Vector a, Vector m, Vector& high, Vector& low) {
    const Vector even = _mm512_mul_epu32(a, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), m);
    high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  }
};
#elif defined(LOCKSTEP_FUSED_256)
struct WideIntegers {
  using Vector = __m256i;
  static constexpr int count = 8;
  LOCKSTEP_INLINE Vector fill(uint32_t v) { return _mm256_set1_epi32(static_cast<int32_t>(v)); }
  LOCKSTEP_INLINE Vector exclusive_or(Vector a, Vector b) { return _mm256_xor_si256(a, b); }
  LOCKSTEP_INLINE void multiply(Vector a, Vector m, Vector& high, Vector& low) {
    const Vector even = _mm256_mul_epu32(a, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  }
};
#else
struct WideIntegers {
  using Vector = uint32_t;
  static constexpr int count = 1;
  LOCKSTEP_INLINE Vector fill(uint32_t v) { return v; }
  LOCKSTEP_INLINE Vector exclusive_or(Vector a, Vector b) { return a ^ b; }
  LOCKSTEP_INLINE void multiply(Vector a, Vector m, Vector& high, Vector& low) {
    const uint64_t product = static_cast<uint64_t>(a) * m;
    high = static_cast<uint32_t>(product >> 32);
    low = static_cast<uint32_t>(product);
  }
};
#endif

LOCKSTEP_INLINE U32x16 philox_first_words(U32x16 ids, uint64_t seed, uint32_t position) {
  using W = WideIntegers;
  W::Vector words[lane_count / W::count];
  __builtin_memcpy(words, &ids, sizeof ids);
  const W::Vector m0 = W::fill(0xD2511F53u), m1 = W::fill(0xCD9E8D57u);
  for (W::Vector& word : words) {
    W::Vector c0 = W::fill(position), c1 = word, c2 = W::fill(0), c3 = W::fill(0);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      W::Vector high_a, low_a, high_b, low_b;
      W::multiply(c0, m0, high_a, low_a);
      W::multiply(c2, m1, high_b, low_b);
      c0 = W::exclusive_or(W::exclusive_or(high_b, c1), W::fill(k0));
      c1 = low_b;
      c2 = W::exclusive_or(W::exclusive_or(high_a, c3), W::fill(k1));
      c3 = low_a;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    word = c0;
  }
  U32x16 result;
  __builtin_memcpy(&result, words, sizeof result);
  return result;
}

// -log(-log(u)), u = ((x >> 8) + 0.5) * 2^-24 with x the Philox word. It lies in [-2.86, 17.33].
LOCKSTEP_INLINE F32x16 gumbel(U32x16 ids, uint64_t seed, uint32_t position) {
  return -logarithm(-logarithm_of_unit(philox_first_words(ids, seed, position) >> 8));
}
