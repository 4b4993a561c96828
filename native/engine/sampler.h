// Chooses tokens from logits: greedy, or temperature, min_p, top_k, top_p and Gumbel noise keyed by (seed, position, id).
// `lockstep.ops.vocabulary` defines it; a row depends on nothing but its logits and its own sampling columns.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine/step.h"
#include "kernels/table.h"

namespace lockstep {

// Philox4x32-10 (Salmon et al., SC 2011): four words from a counter and a key.
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Work space of one thread.
class Sampler {
 public:
  Sampler(const KernelTable* kernels, int64_t vocabulary);

  // Sample `s` of `columns` from logits[vocabulary], changed by `edits`, into `out`. Log probabilities are of the logits as they came.
  // Throws EngineError if the logits hold NaN or nothing finite, before or after.
  void sample(const float* logits, const SamplingColumns& columns, const LogitEdits& edits, int64_t s, const SampleColumns& out);

 private:
  LogitScan scan(const float* logits, const SamplingColumns& columns, int64_t s) const;
  const float* edited(const float* logits, const LogitEdits& edits, int64_t s);
  int64_t choose(const float* logits, const SamplingColumns& columns, int64_t s, const LogitScan& scan);
  int64_t choose_filtered(const float* logits, const SamplingColumns& columns, int64_t s, float scale, float threshold);
  void collect(const float* logits, float scale, float threshold, int64_t count);
  int64_t nucleus(float top_p);
  void report(const float* logits, const SamplingColumns& columns, int64_t s, const LogitScan& scan, int64_t token, const SampleColumns& out);

  const KernelTable* kernels_;
  int64_t vocabulary_;
  std::vector<float> weights_;    // exp(l - largest l) [V]
  std::vector<float> edited_;     // [V], made when the first edit comes
  std::vector<float> maxima_;     // of groups of 16 logits
  std::vector<uint64_t> ranked_;  // candidates as keys that sort best first: see rank_key
  std::vector<uint32_t> ids_;
  std::vector<float> noise_;
};

}  // namespace lockstep
