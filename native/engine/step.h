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
  // Of each group the widest window of those who read it, 0: all before a position is read; -1: no layer is of the group.
  std::vector<int64_t> windows = {};
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
  const int32_t* targets = nullptr;  // -1: a token is chosen; else it is this one, and only its log probability is wanted
};

// Changes of logits before a token is chosen (`lockstep.ops.step.LogitEdits`). Without any, starts is null.
struct LogitEdits {
  const int32_t* mask_rows = nullptr;  // [S], -1: every id may be chosen
  const uint32_t* masks = nullptr;     // [mask_count, mask_width], bit id % 32 of word id / 32
  int64_t mask_count = 0;
  int64_t mask_width = 0;
  const int32_t* starts = nullptr;  // [S + 1]: entries of sample s
  const int32_t* ids = nullptr;     // [entry_count]
  const float* biases = nullptr;
  const float* penalties = nullptr;
  const float* subtracts = nullptr;
  int64_t entry_count = 0;

  bool touch(int64_t s) const { return starts != nullptr && (mask_rows[s] >= 0 || starts[s] < starts[s + 1]); }
};

struct BlockTable {
  const int32_t* entries = nullptr;  // [R, width]
  int64_t width = 0;
};

// Written by the sampler. ranks, top_ids and top_logprobs: [S], [S, top_count], filled with -1, -1 and NaN by the caller.
struct SampleColumns {
  int32_t* tokens = nullptr;
  float* logprobs = nullptr;
  int32_t* ranks = nullptr;
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
  LogitEdits edits;
};

// Throws EngineError unless every count is within `limits`, every row's positions are consecutive from 0 up, every block that a row reads
// or writes is in its table and in the pool, and every sampled index is a token of the step. vocabulary: 0 where the program embeds nothing. top_count: how
// many top ids a sample the outputs have room for.
void check_step(const Step& step, const Limits& limits, int64_t vocabulary, int64_t top_count);

// Throws EngineError unless masks are as wide as `vocabulary` logits need, and every mask row, id and target is there. vocabulary: of the logits.
void check_choices(const Step& step, int64_t vocabulary);

}  // namespace lockstep
