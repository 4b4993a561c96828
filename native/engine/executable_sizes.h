// How the engine cuts work: sizes that change speed and never a bit.
#pragma once

#include <cstdint>

namespace lockstep {

constexpr int64_t head_dim_max = 1024;
constexpr int64_t attention_tokens = 16;         // tokens of one row that share a widened KV tile
constexpr int64_t rows_together = 96;            // rows that pass over a weight panel while it is in the cache
constexpr int64_t floats_worth_a_thread = 8192;  // below this much work, waking another thread costs more than it saves

// Elements between rows of linear's rounded input: whole vectors, so that rows never share one.
constexpr int64_t prepared_stride(int64_t k) { return (k + 31) / 32 * 32; }

}  // namespace lockstep
