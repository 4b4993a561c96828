// Sine and cosine in float64 by IEEE operations alone, so that a position's rotation has the same bits with any C library.
#pragma once

namespace lockstep {

struct SineCosine {
  double sine;
  double cosine;
};

// Of a finite `angle` in radians. Error below 2^-50 for |angle| <= 2^20, growing with the angle beyond (2^-21 at 2^31).
SineCosine sine_cosine(double angle);

}  // namespace lockstep
