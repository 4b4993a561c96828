// What one step hands to a program: pointers and counts, as `lockstep.ops.step` lays them out, and the checks that come before any of it is used.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

struct Limits {
  int64_t tokens_max;
  int64_t rows_max;
  int64_t samples_max;
  int64_t block_size;
  std::vector<int64_t> block_counts;  // a KV group
};

struct SamplingColumns {
  int64_t count = 0;  // S
  const int32_t* index = nullptr;
  const uint64_t* seeds = nullptr;
  const int32_t* positions = nullptr;
  const float* temperatures = nullptr;
  const int32_t* top_ks = nullptr;
  const float* top_ps = nullptr;
  const float* min_ps = nullptr;
  const int32_t* logprob_counts = nullptr;
};

struct BlockTable {
  const int32_t* entries = nullptr;  // [R, width]
  int64_t width = 0;
};

// Written by the sampler. top_ids and top_logprobs: [S, top_count], filled with -1 and NaN by the caller.
struct SampleColumns {
  int32_t* tokens = nullptr;
  float* logprobs = nullptr;
  int32_t* top_ids = nullptr;
  float* top_logprobs = nullptr;
  int64_t top_count = 0;
};

struct Step {
  int64_t tokens = 0;  // T
  int64_t rows = 0;    // R
  const int32_t* token_ids = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* row_starts = nullptr;  // [R + 1]
  std::vector<BlockTable> block_tables;
  SamplingColumns sampling;
};

// Throws EngineError unless every count is within `limits`, every row's positions are consecutive from 0 up, every block that a row needs
// is in its table and in the pool, and every sampled index is a token of the step. vocabulary: 0 where the program embeds nothing. top_count: how
// many top ids a sample the outputs have room for.
void check_step(const Step& step, const Limits& limits, int64_t vocabulary, int64_t top_count);

}  // namespace lockstep
