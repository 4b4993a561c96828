#include "engine/trigonometry.h"

#include <cstdint>

namespace lockstep {
namespace {

// Half of pi in three parts; the first two have 33 bits, so that a product with an integer of 20 bits is exact.
constexpr double half_pi_high = 0x1.921fb544p+0;
constexpr double half_pi_middle = 0x1.0b4611a6p-34;
constexpr double half_pi_low = 0x1.3198a2e037073p-69;
constexpr double two_over_pi = 0x1.45f306dc9c883p-1;
constexpr double rounding_shift = 0x1.8p+52;  // adding it rounds to an integer

// Taylor sums for |r| <= pi / 4; the first term left out is below 2^-53 of the result.
double sine_of(double r) {
  const double s = r * r;
  double p = -1.0 / 1307674368000.0;
  p = p * s + 1.0 / 6227020800.0;
  p = p * s - 1.0 / 39916800.0;
  p = p * s + 1.0 / 362880.0;
  p = p * s - 1.0 / 5040.0;
  p = p * s + 1.0 / 120.0;
  p = p * s - 1.0 / 6.0;
  return r + r * s * p;
}

double cosine_of(double r) {
  const double s = r * r;
  double p = 1.0 / 20922789888000.0;
  p = p * s - 1.0 / 87178291200.0;
  p = p * s + 1.0 / 479001600.0;
  p = p * s - 1.0 / 3628800.0;
  p = p * s + 1.0 / 40320.0;
  p = p * s - 1.0 / 720.0;
  p = p * s + 1.0 / 24.0;
  return 1.0 - (0.5 * s - s * s * p);
}

}  // namespace

SineCosine sine_cosine(double angle) {
  const double n = (angle * two_over_pi + rounding_shift) - rounding_shift;
  const double r = ((angle - n * half_pi_high) - n * half_pi_middle) - n * half_pi_low;
  const double sine = sine_of(r), cosine = cosine_of(r);
  switch (static_cast<int64_t>(n) & 3) {
    case 0: return {sine, cosine};
    case 1: return {cosine, -sine};
    case 2: return {-sine, -cosine};
    default: return {-cosine, sine};
  }
}

}  // namespace lockstep
