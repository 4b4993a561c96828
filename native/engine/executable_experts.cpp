// Mixtures of experts: which experts a token goes to, and what they make of it. A token's result is a function of its own row: experts act on
// whatever tokens chose them, row by row, and a token's sum goes by ascending expert.
#include <algorithm>
#include <cstring>
#include <limits>

#include "engine/error.h"
#include "engine/executable.h"
#include "engine/executable_sizes.h"

namespace lockstep {
namespace {

constexpr float taken = -std::numeric_limits<float>::infinity();

// The first index of the largest value.
int64_t largest_of(const float* values, int64_t count) { return std::max_element(values, values + count) - values; }

// Leave only the experts of the best groups; a group is worth the sum of its best `best` experts, in descending order.
void keep_best_groups(float* ranks, int64_t count, int64_t groups, int64_t kept, int64_t best) {
  const int64_t size = count / groups;
  std::vector<float> worth(static_cast<size_t>(groups), 0.0f), members(static_cast<size_t>(size));
  for (int64_t g = 0; g < groups; ++g) {
    std::copy_n(ranks + g * size, size, members.begin());
    for (int64_t i = 0; i < best; ++i) {
      const int64_t at = largest_of(members.data(), size);
      worth[static_cast<size_t>(g)] += members[static_cast<size_t>(at)];
      members[static_cast<size_t>(at)] = taken;
    }
  }
  std::vector<bool> stays(static_cast<size_t>(groups), false);
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t g = largest_of(worth.data(), groups);
    stays[static_cast<size_t>(g)] = true;
    worth[static_cast<size_t>(g)] = taken;
  }
  for (int64_t e = 0; e < count; ++e) {
    if (!stays[static_cast<size_t>(e / size)]) ranks[e] = taken;
  }
}

}  // namespace

void Executable::route(const OpCall& op, const Step& step) {
  const int64_t count = op.expert_count, k = op.top_k;
  const float* logits = data_[static_cast<size_t>(op.input)];
  float* routing = data_[static_cast<size_t>(op.output)];
  const int64_t rows = rows_of(op.input, step), pieces = std::min(rows, team_.size());
  team_.run(pieces, [&](int64_t piece, int64_t thread) {
    float* scores = scores_.floats() + thread * scores_floats_;
    float* ranks = scores + scores_floats_ / 2;
    for (int64_t t = rows * piece / pieces; t < rows * (piece + 1) / pieces; ++t) {
      const float* row = logits + t * count;
      if (op.sigmoid) {
        for (int64_t e = 0; e < count; ++e) ranks[e] = -row[e];
        kernels_->exp_of(ranks, count, scores);
        for (int64_t e = 0; e < count; ++e) scores[e] = 1.0f / (1.0f + scores[e]);
      } else {
        const auto total = static_cast<float>(kernels_->exp_shifted(row, count, 1.0f, row[largest_of(row, count)], scores));
        for (int64_t e = 0; e < count; ++e) scores[e] = scores[e] / total;
      }
      for (int64_t e = 0; e < count; ++e) ranks[e] = op.weight ? scores[e] + op.weight->floats()[e] : scores[e];
      if (op.groups_kept < op.groups) keep_best_groups(ranks, count, op.groups, op.groups_kept, op.group_best);
      float* ids = routing + t * 2 * k;
      for (int64_t i = 0; i < k; ++i) {
        const int64_t best = largest_of(ranks, count);
        ids[i] = static_cast<float>(best);
        ranks[best] = taken;
      }
      std::sort(ids, ids + k);
      float* weights = ids + k;
      float sum = 0.0f;
      for (int64_t i = 0; i < k; ++i) {
        weights[i] = scores[static_cast<int64_t>(ids[i])];
        sum += weights[i];
      }
      for (int64_t i = 0; i < k; ++i) weights[i] = (op.renormalise ? weights[i] / sum : weights[i]) * op.scale;
    }
  });
}

// Tokens by expert, each expert's in ascending order.
void Executable::gather(const OpCall& op, const Step& step) {
  const int64_t k = op.top_k, count = op.expert_count;
  const float* routing = data_[static_cast<size_t>(op.second)];
  std::fill(expert_starts_.begin(), expert_starts_.end(), 0);
  for (int64_t t = 0; t < step.tokens; ++t) {
    for (int64_t i = 0; i < k; ++i) {
      const float id = routing[t * 2 * k + i];
      if (!(id >= 0.0f && id < static_cast<float>(count)) || (i > 0 && !(id > routing[t * 2 * k + i - 1]))) {
        fail("token ", t, " is routed to expert ", id, ", expected ascending ids from 0 to ", count - 1);
      }
      ++expert_starts_[static_cast<size_t>(id) + 1];
    }
  }
  for (int64_t e = 0; e < count; ++e) expert_starts_[static_cast<size_t>(e) + 1] += expert_starts_[static_cast<size_t>(e)];
  std::vector<int64_t> next(expert_starts_.begin(), expert_starts_.begin() + count);
  for (int64_t t = 0; t < step.tokens; ++t) {
    for (int64_t i = 0; i < k; ++i) {
      const auto e = static_cast<size_t>(routing[t * 2 * k + i]);
      chosen_[static_cast<size_t>(next[e]++)] = {static_cast<int32_t>(t), routing[t * 2 * k + k + i]};
    }
  }
}

void Executable::experts(const OpCall& op, const Step& step) {
  gather(op, step);
  const int64_t width = buffer_width(op.input), ffn = op.bias->columns;
  const float* x = data_[static_cast<size_t>(op.input)];
  float* y = data_[static_cast<size_t>(op.output)];
  if (!op.accumulate) std::memset(y, 0, static_cast<size_t>(step.tokens * width) * sizeof(float));
  const GatedActivation activate = activation_of(op);
  const auto bias_of = [](const WeightPointer& bias, int64_t first) { return bias ? bias->floats() + first : nullptr; };
  float *own = gathered_.floats(), *gate_up = expert_gate_up_.floats(), *activated = expert_activated_.floats(), *out = expert_out_.floats();
  for (int64_t e = 0; e < op.expert_count; ++e) {
    const Choice* choices = chosen_.data() + expert_starts_[static_cast<size_t>(e)];
    const int64_t rows = expert_starts_[static_cast<size_t>(e) + 1] - expert_starts_[static_cast<size_t>(e)];
    if (rows == 0) continue;
    over_rows(rows, width, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) std::memcpy(own + r * width, x + choices[r].token * width, static_cast<size_t>(width) * sizeof(float));
    });
    multiply(own, rows, *op.weight, e * 2 * ffn, 2 * ffn, bias_of(op.gate_up_bias, e * 2 * ffn), gate_up, false);
    over_rows(rows, ffn * 3, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) activate(gate_up + r * 2 * ffn, ffn, activated + r * ffn);
    });
    multiply(activated, rows, *op.bias, e * width, width, bias_of(op.down_bias, e * width), out, false);
    over_rows(rows, width * 2, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        float* sum = y + choices[r].token * width;
        for (int64_t i = 0; i < width; ++i) sum[i] += choices[r].weight * out[r * width + i];
      }
    });
  }
}

}  // namespace lockstep
