#include "engine/step.h"

#include <algorithm>
#include <cmath>

#include "engine/error.h"

namespace lockstep {
namespace {

void check_rows(const Step& step) {
  if (step.row_starts[0] != 0 || step.row_starts[step.rows] != step.tokens) {
    fail("row_starts must run from 0 to the ", step.tokens, " tokens of the step, got ", step.row_starts[0], " to ", step.row_starts[step.rows]);
  }
  for (int64_t r = 0; r < step.rows; ++r) {
    const int64_t begin = step.row_starts[r], end = step.row_starts[r + 1];
    if (begin > end || end > step.tokens) fail("row_starts must not fall nor pass ", step.tokens, ": row ", r, " is ", begin, " to ", end);
    if (begin < end && step.positions[begin] < 0) fail("row ", r, " starts at position ", step.positions[begin], ", expected 0 or more");
    for (int64_t t = begin + 1; t < end; ++t) {
      if (step.positions[t] != int64_t{step.positions[t - 1]} + 1) {
        fail("positions of row ", r, " must be consecutive: ", step.positions[t], " follows ", step.positions[t - 1], " at token ", t);
      }
    }
  }
}

void check_blocks(const Step& step, const Limits& limits) {
  if (step.block_tables.size() != limits.block_counts.size()) {
    fail("expected ", limits.block_counts.size(), " block tables, one a KV group, got ", step.block_tables.size());
  }
  for (size_t group = 0; group < step.block_tables.size(); ++group) {
    const BlockTable& table = step.block_tables[group];
    if (limits.windows[group] < 0) continue;
    for (int64_t r = 0; r < step.rows; ++r) {
      const int64_t end = step.row_starts[r + 1];
      if (step.row_starts[r] == end) continue;
      const int64_t last = step.positions[end - 1] / limits.block_size;
      if (last >= table.width) {
        fail("row ", r, " of KV group ", group, " reaches position ", step.positions[end - 1], " and needs ", last + 1, " blocks of ",
             limits.block_size, ", its table is ", table.width, " wide");
      }
      const int64_t window = limits.windows[group], first = step.positions[step.row_starts[r]];
      for (int64_t b = window == 0 ? 0 : std::max<int64_t>(0, first + 1 - window) / limits.block_size; b <= last; ++b) {
        const int32_t block = table.entries[r * table.width + b];
        if (block < 0 || block >= limits.block_counts[group]) {
          fail("block table of row ", r, ", entry ", b, ", KV group ", group, " is ", block, ", expected 0 to ", limits.block_counts[group] - 1);
        }
      }
    }
  }
}

void check_edits(const Step& step, int64_t vocabulary) {
  const LogitEdits& edits = step.edits;
  if (edits.starts == nullptr) return;
  const int64_t count = step.sampling.count;
  if (edits.mask_count > 0 && edits.mask_width != (vocabulary + 31) / 32) {
    fail("masks are ", edits.mask_width, " words wide, ", vocabulary, " logits need ", (vocabulary + 31) / 32);
  }
  if (edits.starts[0] != 0 || edits.starts[count] != edits.entry_count) {
    fail("starts of logit edits must run from 0 to their ", edits.entry_count, " entries, got ", edits.starts[0], " to ", edits.starts[count]);
  }
  for (int64_t s = 0; s < count; ++s) {
    if (edits.starts[s] > edits.starts[s + 1]) fail("starts of logit edits must not fall: ", edits.starts[s + 1], " follows ", edits.starts[s]);
    if (edits.mask_rows[s] < -1 || edits.mask_rows[s] >= edits.mask_count) {
      fail("sample ", s, " has mask ", edits.mask_rows[s], ", there are ", edits.mask_count);
    }
  }
  for (int64_t i = 0; i < edits.entry_count; ++i) {
    if (edits.ids[i] < 0 || edits.ids[i] >= vocabulary) fail("logit edit ", i, " is of id ", edits.ids[i], ", expected 0 to ", vocabulary - 1);
    if (!(edits.penalties[i] > 0.0f)) fail("logit edit ", i, " has penalty ", edits.penalties[i], ", expected above 0");
  }
}

}  // namespace

void check_choices(const Step& step, int64_t vocabulary) {
  for (int64_t s = 0; s < step.sampling.count; ++s) {
    const int32_t target = step.sampling.targets[s];
    if (target < -1 || target >= vocabulary) fail("sample ", s, " has target ", target, ", expected -1 to ", vocabulary - 1);
  }
  check_edits(step, vocabulary);
}

void check_step(const Step& step, const Limits& limits, int64_t vocabulary, int64_t top_count) {
  if (step.tokens > limits.tokens_max) fail("a step of ", step.tokens, " tokens, at most ", limits.tokens_max, " were allowed for");
  if (step.rows > limits.rows_max) fail("a step of ", step.rows, " rows, at most ", limits.rows_max, " were allowed for");
  if (step.sampling.count > limits.samples_max)
    fail("a step of ", step.sampling.count, " samples, at most ", limits.samples_max, " were allowed for");
  check_rows(step);
  check_blocks(step, limits);
  for (int64_t t = 0; vocabulary > 0 && t < step.tokens; ++t) {
    if (step.token_ids[t] < 0 || step.token_ids[t] >= vocabulary)
      fail("token ", t, " has id ", step.token_ids[t], ", expected 0 to ", vocabulary - 1);
  }
  for (int64_t s = 0; s < step.sampling.count; ++s) {
    const int32_t index = step.sampling.index[s];
    if (index < 0 || index >= step.tokens) fail("sample ", s, " has index ", index, ", expected 0 to ", step.tokens - 1);
    const float temperature = step.sampling.temperatures[s];
    if (!(temperature >= 0.0f) || !std::isfinite(temperature)) fail("sample ", s, " has temperature ", temperature, ", expected 0 or more");
    if (step.sampling.logprob_counts[s] > top_count) {
      fail("sample ", s, " asks for ", step.sampling.logprob_counts[s], " top ids, the outputs hold ", top_count);
    }
  }
}

}  // namespace lockstep
