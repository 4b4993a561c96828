#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "engine/error.h"

namespace lockstep {
namespace {

constexpr int64_t first_sorted = 256;  // candidates that top_p sorts before it looks at more

// (l, id) as one integer that sorts by descending l, then ascending id.
uint64_t rank_key(float l, uint32_t id) {
  l += 0.0f;  // -0 ranks with +0
  uint32_t bits;
  std::memcpy(&bits, &l, sizeof bits);
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | id;
}

float rank_value(uint64_t key) {
  const uint32_t ascending = ~static_cast<uint32_t>(key >> 32);
  const uint32_t bits = ascending & 0x80000000u ? ascending & 0x7fffffffu : ~ascending;
  float l;
  std::memcpy(&l, &bits, sizeof l);
  return l;
}

// Sort the best `count` of keys to the front.
void sort_best(std::vector<uint64_t>& keys, int64_t begin, int64_t count) {
  const auto first = keys.begin() + begin;
  if (begin + count < static_cast<int64_t>(keys.size())) std::nth_element(first, first + count, keys.end());
  std::sort(first, first + std::min<int64_t>(count, static_cast<int64_t>(keys.size()) - begin));
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{c[0]} * 0xD2511F53u, b = uint64_t{c[2]} * 0xCD9E8D57u;
    c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(b), static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1],
         static_cast<uint32_t>(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return c;
}

Sampler::Sampler(const KernelTable* kernels, int64_t vocabulary)
    : kernels_(kernels), vocabulary_(vocabulary), weights_(vocabulary), maxima_((vocabulary + lane_count - 1) / lane_count) {}

void Sampler::sample(const float* logits, const SamplingColumns& columns, const LogitEdits& edits, int64_t s, const SampleColumns& out) {
  const LogitScan raw = scan(logits, columns, s);
  int64_t token;
  if (columns.targets[s] >= 0) {
    token = columns.targets[s];
  } else if (edits.touch(s)) {
    const float* changed = edited(logits, edits, s);
    token = choose(changed, columns, s, scan(changed, columns, s));
  } else {
    token = choose(logits, columns, s, raw);
  }
  out.tokens[s] = static_cast<int32_t>(token);
  if (columns.logprob_counts[s] >= 0) report(logits, columns, s, raw, token, out);
}

LogitScan Sampler::scan(const float* logits, const SamplingColumns& columns, int64_t s) const {
  const LogitScan found = kernels_->scan_logits(logits, vocabulary_);
  if (found.has_nan) fail("logits of sample ", s, " (position ", columns.positions[s], ") hold NaN; no token is chosen from them");
  if (!std::isfinite(found.largest)) fail("logits of sample ", s, " (position ", columns.positions[s], ") have ", found.largest, " as their largest");
  return found;
}

// A copy, so that log probabilities still see what came: masked ids become minus infinity, then the entries act one after the other.
const float* Sampler::edited(const float* logits, const LogitEdits& edits, int64_t s) {
  edited_.assign(logits, logits + vocabulary_);
  if (edits.mask_rows[s] >= 0) {
    const uint32_t* mask = edits.masks + edits.mask_rows[s] * edits.mask_width;
    for (int64_t id = 0; id < vocabulary_; ++id) {
      if ((mask[id / 32] >> (id % 32) & 1u) == 0) edited_[id] = -std::numeric_limits<float>::infinity();
    }
  }
  for (int64_t i = edits.starts[s]; i < edits.starts[s + 1]; ++i) {
    float& l = edited_[edits.ids[i]];
    l += edits.biases[i];
    l = l > 0.0f ? l / edits.penalties[i] : l * edits.penalties[i];
    l -= edits.subtracts[i];
  }
  return edited_.data();
}

int64_t Sampler::choose(const float* logits, const SamplingColumns& columns, int64_t s, const LogitScan& scan) {
  if (columns.temperatures[s] == 0.0f) return scan.argmax;
  const float scale = 1.0f / columns.temperatures[s];
  const float largest = scan.largest * scale;
  if (!std::isfinite(largest)) return scan.argmax;  // so cold that l overflows: no noise could change the choice
  kernels_->exp_shifted(logits, vocabulary_, scale, largest, weights_.data());
  const float threshold = std::max(columns.min_ps[s], 0.0f);  // p >= min_p * max(p), and max(p) is 1 / total: weights compare alike
  const bool all_k = columns.top_ks[s] <= 0 || columns.top_ks[s] >= vocabulary_;
  if (!all_k || columns.top_ps[s] < 1.0f) return choose_filtered(logits, columns, s, scale, threshold);
  GumbelCall call{logits,     weights_.data(), vocabulary_, scale, threshold, largest, columns.seeds[s], static_cast<uint32_t>(columns.positions[s]),
                  scan.argmax};
  return kernels_->gumbel_argmax(call);
}

// Put the ids with weight >= threshold into ranked_; the best `count` of them are sure to be among it, so where count is small few others are.
void Sampler::collect(const float* logits, float scale, float threshold, int64_t count) {
  ranked_.clear();
  float floor = -std::numeric_limits<float>::infinity();
  if (count * 4 < static_cast<int64_t>(maxima_.size())) {
    // At least `count` groups hold a logit as large as the count-th largest group maximum.
    kernels_->group_maxima(logits, vocabulary_, maxima_.data());
    std::vector<float> order(maxima_);
    std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), std::greater<float>());
    floor = order[count - 1] * scale;  // compared after scaling, which may make different logits equal
  } else {
    std::fill(maxima_.begin(), maxima_.end(), std::numeric_limits<float>::infinity());
  }
  for (int64_t group = 0; group < static_cast<int64_t>(maxima_.size()); ++group) {
    if (maxima_[group] * scale < floor) continue;
    const int64_t end = std::min((group + 1) * lane_count, vocabulary_);
    for (int64_t id = group * lane_count; id < end; ++id) {
      const float l = logits[id] * scale;
      if (l >= floor && weights_[id] >= threshold) ranked_.push_back(rank_key(l, static_cast<uint32_t>(id)));
    }
  }
}

int64_t Sampler::choose_filtered(const float* logits, const SamplingColumns& columns, int64_t s, float scale, float threshold) {
  const int64_t top_k = columns.top_ks[s] <= 0 ? vocabulary_ : std::min<int64_t>(columns.top_ks[s], vocabulary_);
  collect(logits, scale, threshold, top_k);
  if (static_cast<int64_t>(ranked_.size()) > top_k) {
    std::nth_element(ranked_.begin(), ranked_.begin() + top_k, ranked_.end());
    ranked_.resize(static_cast<size_t>(top_k));
  }
  const int64_t kept = columns.top_ps[s] < 1.0f ? nucleus(columns.top_ps[s]) : static_cast<int64_t>(ranked_.size());
  ids_.resize(static_cast<size_t>(kept));
  noise_.resize(static_cast<size_t>(kept));
  for (int64_t i = 0; i < kept; ++i) ids_[i] = static_cast<uint32_t>(ranked_[i]);
  kernels_->gumbel_of(ids_.data(), kept, columns.seeds[s], static_cast<uint32_t>(columns.positions[s]), noise_.data());
  int64_t winner = ids_[0];
  float best = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < kept; ++i) {
    const float score = rank_value(ranked_[i]) + noise_[i];
    if (score > best || (score == best && ids_[i] < winner)) {
      best = score;
      winner = ids_[i];
    }
  }
  return winner;
}

// How many of ranked_, sorted that far, are the shortest prefix whose share of the kept weight reaches top_p. Sums are float64 in ascending id order
// (the whole) and in rank order (the prefix), so they do not depend on how candidates were found.
int64_t Sampler::nucleus(float top_p) {
  const int64_t count = static_cast<int64_t>(ranked_.size());
  ids_.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) ids_[i] = static_cast<uint32_t>(ranked_[i]);
  if (!std::is_sorted(ids_.begin(), ids_.end())) std::sort(ids_.begin(), ids_.end());
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) total += weights_[ids_[i]];
  const double wanted = static_cast<double>(top_p) * total;
  double reached = 0.0;
  int64_t sorted = 0;
  for (int64_t chunk = first_sorted; sorted < count; chunk *= 8) {
    sort_best(ranked_, sorted, chunk);
    const int64_t end = std::min(count, sorted + chunk);
    for (; sorted < end; ++sorted) {
      reached += weights_[static_cast<uint32_t>(ranked_[sorted])];
      if (reached >= wanted) return sorted + 1;
    }
  }
  return count;
}

void Sampler::report(const float* logits, const SamplingColumns& columns, int64_t s, const LogitScan& scan, int64_t token, const SampleColumns& out) {
  const double total = kernels_->exp_shifted(logits, vocabulary_, 1.0f, scan.largest, weights_.data());
  const double log_total = static_cast<double>(scan.largest) + std::log(total);
  const auto logprob = [&](int64_t id) { return static_cast<float>(static_cast<double>(logits[id]) - log_total); };
  out.logprobs[s] = logprob(token);
  int64_t better = 0;
  for (int64_t id = 0; id < vocabulary_; ++id) better += logits[id] > logits[token];
  out.ranks[s] = static_cast<int32_t>(better + 1);
  const int64_t count = std::min<int64_t>(columns.logprob_counts[s], vocabulary_);
  if (count == 0) return;
  collect(logits, 1.0f, 0.0f, count);
  sort_best(ranked_, 0, count);
  for (int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<uint32_t>(ranked_[i]);
    out.top_ids[s * out.top_count + i] = static_cast<int32_t>(id);
    out.top_logprobs[s * out.top_count + i] = logprob(id);
  }
}

}  // namespace lockstep
