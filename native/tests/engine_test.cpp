// The engine from C++, without Python: made to be run under the sanitizers (LOCKSTEP_SANITIZE=address,undefined and =thread), at odd widths and with
// several threads. What the numbers must be is tested from Python; here every instruction set runs every op, and must agree with itself bit for bit.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "engine/error.h"
#include "engine/executable.h"
#include "engine/instruction_sets.h"
#include "engine/thread_team.h"

namespace {

using namespace lockstep;

void check(bool holds, const std::string& claim) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", claim.c_str());
  std::exit(1);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const EngineError& error) {
    return error.what();
  }
  return "";
}

std::vector<float> numbers(int64_t count, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f;
  }
  return values;
}

void test_team_runs_every_item_once() {
  for (const int64_t threads : {1, 2, 5}) {
    ThreadTeam team(threads);
    for (int64_t region = 0; region < 2000; ++region) {
      const int64_t items = region % 37;
      std::vector<int32_t> runs(static_cast<size_t>(items));  // an item is touched by one thread only
      team.run(items, [&](int64_t item, int64_t thread) { runs[static_cast<size_t>(item)] += thread < threads ? 1 : 100; });
      for (const int32_t count : runs) check(count == 1, "each item runs once");
    }
  }
  for (int repeat = 0; repeat < 200; ++repeat) ThreadTeam team(3);  // made and ended without a region
}

constexpr int64_t vocabulary = 131, hidden = 37, heads = 3, head_dim = 10, kv_heads = 1, width = heads * head_dim, ffn = 21;

// One decoder layer with tied embeddings and a bias. Buffers: 0 x, 1 normed, 2 qkv, 3 q, 4 attended, 5 gate and up, 6 activated, 7 last, 8 logits.
// Kind::rich: with a window, soft caps, norms of heads and of what a branch adds, a part of a head that does not turn, a scaled embedding and gelu.
// Kind::latent: keys alone are kept, of which values are the end, and attention has sinks. Buffers: 9 keys, 10 turned queries, 11 values.
enum class Kind { plain, rich, latent };

constexpr int64_t latent_heads = 3, latent_rope = 4, latent_plain = 6, latent_rank = 64, latent_width = latent_rope + latent_rank;

std::vector<OpCall> small_model(WeightArena& arena, DType dtype, Kind kind) {
  const bool rich = kind == Kind::rich, latent = kind == Kind::latent;
  const auto pack = [&](int64_t rows, int64_t columns, Layout layout, uint32_t seed) {
    return std::make_shared<const PackedWeight>(pack_weight(arena, numbers(rows * columns, seed).data(), rows, columns, dtype, layout));
  };
  const WeightPointer table = pack(vocabulary, hidden, Layout::panels, 1), gain = pack(1, hidden, Layout::vector, 2);
  const WeightPointer frequencies = pack(1, latent ? latent_rope / 2 : rich ? head_dim / 2 - 2 : head_dim / 2, Layout::vector, 3);
  std::vector<OpCall> ops;
  ops.push_back({OpKind::embed, -1, 0, table});
  if (rich) ops.back().scale = 6.08f;
  ops.push_back({OpKind::rms_norm, 0, 1, gain, nullptr, false, 1e-5f});
  if (latent) {
    ops.push_back({OpKind::linear, 1, 2, pack(latent_heads * (latent_rope + latent_plain), hidden, Layout::panels, 4)});
    ops.push_back({OpKind::linear, 1, 9, pack(latent_width, hidden, Layout::panels, 5)});
    ops.push_back({OpKind::rms_norm, 9, 9, pack(1, latent_rank, Layout::vector, 10), nullptr, false, 1e-6f});
    ops.back().column = latent_rope;
    ops.back().groups = 1;
    ops.push_back({OpKind::head_linear, 2, 10, pack(latent_heads * latent_rank, latent_plain, Layout::panels, 11)});
    ops.back().heads = latent_heads;
    ops.back().passed = latent_rope;
    ops.push_back({OpKind::latent_write, 10, 3, frequencies, nullptr, false, 0.0f, 0, latent_heads});
    ops.back().second = 9;
    ops.push_back({OpKind::paged_attention, 3, 4, pack(1, latent_heads, Layout::vector, 12), nullptr, false, 0.3f, 0, latent_heads});
    ops.push_back({OpKind::head_linear, 4, 11, pack(latent_heads * 64, latent_rank, Layout::panels, 13)});
    ops.back().heads = latent_heads;
    ops.push_back({OpKind::linear, 11, 0, pack(hidden, latent_heads * 64, Layout::panels, 6), nullptr, true});
    ops.push_back({OpKind::linear, 0, 5, pack(2 * ffn, hidden, Layout::panels, 7)});
    ops.push_back({OpKind::gated_activation, 5, 6});
    ops.back().activation = Activation::clamped_silu;
    ops.push_back({OpKind::linear, 6, 0, pack(hidden, ffn, Layout::panels, 8), nullptr, true});
    ops.push_back({OpKind::select, 0, 7});
    ops.push_back({OpKind::linear, 7, 8, table});
    ops.push_back({OpKind::sample, 8});
    return ops;
  }
  ops.push_back({OpKind::linear, 1, 2, pack(width + 2 * kv_heads * head_dim, hidden, Layout::panels, 4),
                 pack(1, width + 2 * kv_heads * head_dim, Layout::vector, 5)});
  if (rich) {
    ops.push_back({OpKind::rms_norm, 2, 2, pack(1, head_dim, Layout::vector, 9), nullptr, false, 1e-5f});
    ops.back().offset = 1.0f;
    ops.back().column = head_dim;
    ops.back().groups = heads;
  }
  ops.push_back({OpKind::rope_write, 2, 3, frequencies, nullptr, false, 0.0f, 0, heads});
  if (rich) ops.back().scale = 1.2f;
  ops.push_back({OpKind::paged_attention, 3, 4, nullptr, nullptr, false, 0.3f, 0, heads});
  if (rich) {
    ops.back().window = 7;
    ops.back().soft_cap = 0.5f;
  }
  ops.push_back({OpKind::linear, 4, 0, pack(hidden, width, Layout::panels, 6), nullptr, true});
  ops.push_back({OpKind::linear, 0, 5, pack(2 * ffn, hidden, Layout::panels, 7)});
  ops.push_back({OpKind::gated_activation, 5, 6});
  if (rich) ops.back().activation = Activation::gelu_tanh;
  ops.push_back({OpKind::linear, 6, 0, pack(hidden, ffn, Layout::panels, 8), nullptr, true});
  if (rich) ops.push_back({OpKind::rms_norm, 1, 0, gain, nullptr, true, 1e-5f});
  ops.push_back({OpKind::select, 0, 7});
  ops.push_back({OpKind::linear, 7, 8, table});
  if (rich) ops.push_back({OpKind::soft_cap, 8, 8, nullptr, nullptr, false, 2.0f});
  ops.push_back({OpKind::sample, 8});
  return ops;
}

struct Outputs {
  std::vector<int32_t> tokens = std::vector<int32_t>(2), ranks = std::vector<int32_t>(2), top_ids = std::vector<int32_t>(6);
  std::vector<float> logprobs = std::vector<float>(2), top_logprobs = std::vector<float>(6);
};

struct Run {
  std::vector<int32_t> token_ids, positions, row_starts, table;
  int64_t table_width;
};

Outputs run(Executable& executable, const Run& r) {
  const auto rows = static_cast<int64_t>(r.row_starts.size()) - 1;
  std::vector<int32_t> index, sampled_positions;
  for (int64_t row = 0; row < rows; ++row) {
    index.push_back(r.row_starts[static_cast<size_t>(row) + 1] - 1);
    sampled_positions.push_back(static_cast<int32_t>(10 * row) + 50);
  }
  const std::vector<uint64_t> seeds(2, 7);
  const std::vector<float> temperatures = {0.8f, 1.5f}, top_ps = {1.0f, 0.9f}, min_ps = {0.01f, 0.0f};
  const std::vector<int32_t> top_ks = {0, 50}, logprob_counts = {3, 0}, targets(2, -1);
  Outputs out;
  Step step;
  step.tokens = static_cast<int64_t>(r.token_ids.size());
  step.rows = rows;
  step.token_ids = r.token_ids.data();
  step.positions = r.positions.data();
  step.row_starts = r.row_starts.data();
  step.block_tables = {{r.table.data(), r.table_width}};
  step.sampling = {rows,          index.data(),  seeds.data(),  sampled_positions.data(), temperatures.data(),
                   top_ks.data(), top_ps.data(), min_ps.data(), logprob_counts.data(), targets.data()};
  executable.run(step, {}, {out.tokens.data(), out.logprobs.data(), out.ranks.data(), out.top_ids.data(), out.top_logprobs.data(), 3});
  return out;
}

Executable make(const KernelTable* kernels, DType dtype, DType kv_dtype, int64_t threads, int64_t block_size, Kind kind, const std::vector<OpCall>& ops) {
  if (kind == Kind::latent) {
    constexpr int64_t queries = latent_heads * latent_width, both = latent_heads * latent_rank;
    const std::vector<BufferShape> buffers = {{false, hidden}, {false, hidden}, {false, latent_heads * (latent_rope + latent_plain)},
                                              {false, queries}, {false, both}, {false, 2 * ffn}, {false, ffn}, {true, hidden},
                                              {true, vocabulary}, {false, latent_width}, {false, queries}, {false, latent_heads * 64}};
    return Executable(kernels, dtype, kv_dtype, Limits{64, 2, 4, block_size, {40}}, threads, buffers, {{1, latent_width, 0, latent_rank}}, ops);
  }
  const std::vector<BufferShape> buffers = {{false, hidden}, {false, hidden}, {false, width + 2 * kv_heads * head_dim},
                                            {false, width},  {false, width},  {false, 2 * ffn},
                                            {false, ffn},    {true, hidden},  {true, vocabulary}};
  return Executable(kernels, dtype, kv_dtype, Limits{64, 2, 4, block_size, {40}}, threads, buffers, {{kv_heads, head_dim, 0, 0}}, ops);
}

// Two requests of 40 and 9 tokens of one text, whole or in chunks of one token of each.
Outputs run_model(const KernelTable* kernels, DType dtype, DType kv_dtype, Kind kind, int64_t threads, int64_t block_size, bool chunked) {
  WeightArena arena;
  const std::vector<OpCall> ops = small_model(arena, dtype, kind);
  Executable executable = make(kernels, dtype, kv_dtype, threads, block_size, kind, ops);
  const int64_t table_width = (40 + block_size - 1) / block_size;
  std::vector<int32_t> table;
  for (int64_t i = 0; i < 2 * table_width; ++i) table.push_back(static_cast<int32_t>((i * 7 + 3) % 40));
  if (2 * table_width > 40) {
    for (size_t i = static_cast<size_t>(table_width) + 9; i < table.size(); ++i) table[i] = -1;
    for (int64_t i = 0; i < 9; ++i) table[static_cast<size_t>(table_width + i)] = table[static_cast<size_t>(i)];  // the same prompt: shared blocks
  }
  const auto token = [](int32_t position) { return (position * 29 + 5) % static_cast<int32_t>(vocabulary); };
  Run whole{{}, {}, {0, 40, 49}, table, table_width};
  for (const int32_t length : {40, 9}) {
    for (int32_t p = 0; p < length; ++p) {
      whole.token_ids.push_back(token(p));
      whole.positions.push_back(p);
    }
  }
  if (!chunked) return run(executable, whole);
  Outputs last;
  for (int32_t p = 0; p < 40; ++p) {
    Run one{{token(p), token(std::min(p, 8))}, {p, std::min(p, 8)}, {0, 1, 2}, table, table_width};
    last = run(executable, one);
  }
  return last;
}

void test_model_agrees_with_itself(Kind kind) {
  for (const KernelTable* kernels : usable_kernels()) {
    std::vector<std::pair<DType, DType>> dtypes = {{DType::float32, DType::float32}, {DType::bfloat16, DType::bfloat16}};
    if (kind == Kind::plain) dtypes = {{DType::bfloat16, DType::int8}, {DType::float32, DType::float32}};
    if (kind == Kind::latent) dtypes = {{DType::float32, DType::int8}, {DType::bfloat16, DType::bfloat16}};
    for (const auto& [dtype, kv_dtype] : dtypes) {
      const Outputs expected = run_model(kernels, dtype, kv_dtype, kind, 1, 16, false);
      for (const int64_t threads : {1, 3}) {
        for (const int64_t block_size : {1, 5, 16, 32}) {
          for (const bool chunked : {false, true}) {
            const Outputs got = run_model(kernels, dtype, kv_dtype, kind, threads, block_size, chunked);
            const std::string where =
                std::string(kernels->name) + ", threads " + std::to_string(threads) + ", block size " + std::to_string(block_size);
            check(got.tokens == expected.tokens && got.top_ids == expected.top_ids, "tokens do not change: " + where);
            check(std::memcmp(got.logprobs.data(), expected.logprobs.data(), 8) == 0, "logprobs do not change: " + where);
          }
        }
      }
    }
  }
}

// Everything that a step names, each in memory of its own, so that the sanitizer sees a read beyond any of them. Two rows at positions 0 .. 1 and
// 4 .. 5, a sample and a target for each; the first sample has a mask and an edit.
struct StepData {
  std::vector<int32_t> token_ids = {1, 2, 3, 4}, positions = {0, 1, 4, 5}, row_starts = {0, 2, 4}, table = {39, -1, 7, 8};
  std::vector<int32_t> index = {1, 3, 0, 2}, sampled_positions = {2, 6, 1, 5}, top_ks = {0, 5, 0, 0}, logprob_counts = {3, 0, 1, -1};
  std::vector<int32_t> targets = {-1, -1, 2, 4}, mask_rows = {0, -1, -1, -1}, starts = {0, 1, 1, 1, 1}, ids = {130};
  std::vector<uint32_t> masks = std::vector<uint32_t>(5, 0xffffffffu);
  std::vector<uint64_t> seeds = {1, 2, 3, 4};
  std::vector<float> temperatures = {0.0f, 0.9f, 0.0f, 0.0f}, top_ps = {1, 0.9f, 1, 1}, min_ps = {0, 0, 0, 0};
  std::vector<float> biases = {1.0f}, penalties = {2.0f}, subtracts = {0.5f};
  int64_t mask_count = 1, mask_width = 5, top_count = 3;
};

void run(Executable& executable, const StepData& d) {
  Step step;
  step.tokens = static_cast<int64_t>(d.token_ids.size());
  step.rows = static_cast<int64_t>(d.row_starts.size()) - 1;
  step.token_ids = d.token_ids.data();
  step.positions = d.positions.data();
  step.row_starts = d.row_starts.data();
  step.block_tables = {{d.table.data(), 2}};
  const auto count = static_cast<int64_t>(d.index.size());
  step.sampling = {count,           d.index.data(),  d.seeds.data(),  d.sampled_positions.data(), d.temperatures.data(),
                   d.top_ks.data(), d.top_ps.data(), d.min_ps.data(), d.logprob_counts.data(),    d.targets.data()};
  step.edits = {d.mask_rows.data(), d.masks.data(),     d.mask_count,       d.mask_width,      d.starts.data(),
                d.ids.data(),       d.biases.data(),    d.penalties.data(), d.subtracts.data(), static_cast<int64_t>(d.ids.size())};
  const auto size = static_cast<size_t>(count);
  std::vector<int32_t> tokens(size), ranks(size), top_ids(size * static_cast<size_t>(d.top_count));
  std::vector<float> logprobs(size), top_logprobs(size * static_cast<size_t>(d.top_count));
  executable.run(step, {}, {tokens.data(), logprobs.data(), ranks.data(), top_ids.data(), top_logprobs.data(), d.top_count});
}

void test_malformed_steps_are_refused() {
  constexpr int32_t most = std::numeric_limits<int32_t>::max(), least = std::numeric_limits<int32_t>::min();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const KernelTable* kernels : usable_kernels()) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      WeightArena arena;
      Executable executable = make(kernels, dtype, dtype, 2, 4, Kind::plain, small_model(arena, dtype, Kind::plain));
      const auto refused = [&](const std::function<void(StepData&)>& change) {
        StepData data;
        change(data);
        return !error_of([&] { run(executable, data); }).empty();
      };
      check(!refused([](StepData&) {}), "a good step runs");
      const auto refuse_all = [&](const char* what, std::vector<int32_t> StepData::*field, const std::vector<int32_t>& values) {
        for (size_t at = 0; at < (StepData().*field).size(); ++at) {
          if (field == &StepData::table && at == 1) continue;  // beyond the row's last block: never read
          for (const int32_t value : values) {
            check(refused([&](StepData& d) { (d.*field)[at] = value; }), std::string(what) + " of " + std::to_string(value) + " at " + std::to_string(at));
          }
        }
      };
      refuse_all("a token id", &StepData::token_ids, {-1, 131, most, least});
      refuse_all("a position", &StepData::positions, {-1, 9, most, least});
      refuse_all("a row start", &StepData::row_starts, {-1, 5, most, least});
      refuse_all("a block", &StepData::table, {-1, 40, most, least});
      refuse_all("a sample's index", &StepData::index, {-1, 4, most, least});
      refuse_all("a target", &StepData::targets, {-2, 131, most, least});
      refuse_all("a mask row", &StepData::mask_rows, {-2, 1, most, least});
      refuse_all("a start of edits", &StepData::starts, {-1, 2, most, least});
      refuse_all("an edit's id", &StepData::ids, {-1, 131, most, least});
      refuse_all("a count of log probabilities", &StepData::logprob_counts, {4, most});
      check(refused([](StepData& d) { d.positions = {most - 1, most, 4, 5}; }), "positions at the end of the integers");
      check(refused([](StepData& d) { d.positions = {0, 1, most, least}; }), "positions that wrap");
      check(refused([](StepData& d) { d.positions = {0, 1, 8, 9}; }), "a table too narrow");
      check(refused([](StepData& d) { d.row_starts = {0, 2, 3}; }), "tokens that no row has");
      check(refused([](StepData& d) { d.mask_width = 4; }), "masks narrower than the logits");
      check(refused([&](StepData& d) { d.temperatures[1] = nan; }), "a temperature that is no number");
      check(refused([&](StepData& d) { d.penalties[0] = 0.0f; }), "a penalty of 0");
      check(refused([&](StepData& d) { d.biases[0] = nan; }), "a bias that is no number");
      check(refused([](StepData& d) {
              d.row_starts = {0, 1, 2, 3, 4};
              d.positions = {0, 0, 0, 0};
            }),
            "more rows than were allowed for");
      check(!refused([](StepData&) {}), "and the next good step runs");
    }
  }
}

constexpr int64_t experts_count = 5, expert_width = 64, expert_ffn = 32, expert_top_k = 2;

// Buffers: 0 x, 1 routing, 2 y; logits come in as x's first columns by a buffer of their own, 3.
std::vector<float> run_experts(const KernelTable* kernels, DType dtype, int64_t threads, const std::vector<float>& x, const std::vector<float>& logits,
                               const float* routed) {
  WeightArena arena;
  const auto pack = [&](int64_t rows, int64_t columns, uint32_t seed) {
    return std::make_shared<const PackedWeight>(pack_weight(arena, numbers(rows * columns, seed).data(), rows, columns, dtype, Layout::panels));
  };
  OpCall route{OpKind::route, 3, 1};
  route.expert_count = experts_count;
  route.top_k = expert_top_k;
  route.groups = route.groups_kept = route.group_best = 1;
  route.renormalise = true;
  OpCall experts{OpKind::experts, 0, 2, pack(experts_count * 2 * expert_ffn, expert_width, 1), pack(experts_count * expert_width, expert_ffn, 2)};
  experts.second = 1;
  const auto bias = [&](int64_t count, uint32_t seed) {
    return std::make_shared<const PackedWeight>(pack_weight(arena, numbers(count, seed).data(), 1, count, dtype, Layout::vector));
  };
  experts.gate_up_bias = bias(experts_count * 2 * expert_ffn, 5);
  experts.down_bias = bias(experts_count * expert_width, 6);
  experts.activation = Activation::clamped_silu;
  experts.expert_count = experts_count;
  experts.top_k = expert_top_k;
  std::vector<OpCall> ops;
  if (routed == nullptr) ops.push_back(route);
  ops.push_back(experts);
  const std::vector<BufferShape> buffers = {{false, expert_width}, {false, 2 * expert_top_k}, {false, expert_width}, {false, experts_count}};
  Executable executable(kernels, dtype, dtype, Limits{16, 16, 1, 4, {8}}, threads, buffers, {}, ops);
  const int64_t tokens = static_cast<int64_t>(x.size()) / expert_width;
  std::vector<float> y(x.size()), own_x(x), own_logits(logits), routing(static_cast<size_t>(tokens * 2 * expert_top_k));
  if (routed != nullptr) std::copy_n(routed, routing.size(), routing.begin());
  std::vector<int32_t> ids(static_cast<size_t>(tokens)), positions(ids), row_starts;
  for (int64_t t = 0; t <= tokens; ++t) row_starts.push_back(static_cast<int32_t>(t));
  Step step;
  step.tokens = step.rows = tokens;
  step.token_ids = ids.data();
  step.positions = positions.data();
  step.row_starts = row_starts.data();
  const std::vector<int32_t> table(static_cast<size_t>(tokens));
  step.block_tables = {{table.data(), 1}};
  executable.run(step, {{0, own_x.data()}, {1, routing.data()}, {2, y.data()}, {3, own_logits.data()}}, {});
  return y;
}

void test_a_token_gets_the_same_of_its_experts_in_any_company() {
  constexpr int64_t tokens = 13;
  const std::vector<float> x = numbers(tokens * expert_width, 3), logits = numbers(tokens * experts_count, 4);
  for (const KernelTable* kernels : usable_kernels()) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      const std::vector<float> together = run_experts(kernels, dtype, 1, x, logits, nullptr);
      check(run_experts(kernels, dtype, 3, x, logits, nullptr) == together, "threads change nothing");
      for (int64_t t = 0; t < tokens; ++t) {
        const std::vector<float> own(x.begin() + t * expert_width, x.begin() + (t + 1) * expert_width);
        const std::vector<float> alone =
            run_experts(kernels, dtype, 1, own, {logits.begin() + t * experts_count, logits.begin() + (t + 1) * experts_count}, nullptr);
        check(std::equal(alone.begin(), alone.end(), together.begin() + t * expert_width), "company changes nothing");
      }
    }
  }
}

void test_ids_of_experts_out_of_range_are_refused() {
  const std::vector<float> x = numbers(expert_width, 3), logits(experts_count);
  const float nan = std::numeric_limits<float>::quiet_NaN(), endless = std::numeric_limits<float>::infinity();
  const auto refused = [&](float first, float second) {
    const float routing[] = {first, second, 0.5f, 0.5f};
    return !error_of([&] { run_experts(usable_kernels()[0], DType::float32, 2, x, logits, routing); }).empty();
  };
  check(!refused(0, 4), "ids in range run");
  for (const float bad : {-1.0f, 5.0f, 1e30f, -1e30f, nan, endless}) {
    check(refused(bad, 4), "a first id out of range");
    check(refused(0, bad), "a second id out of range");
  }
  check(refused(3, 3) && refused(3, 1), "ids that do not ascend");
}

}  // namespace

int main() {
  test_team_runs_every_item_once();
  for (const Kind kind : {Kind::plain, Kind::rich, Kind::latent}) test_model_agrees_with_itself(kind);
  test_malformed_steps_are_refused();
  test_a_token_gets_the_same_of_its_experts_in_any_company();
  test_ids_of_experts_out_of_range_are_refused();
  std::puts("ok");
  return 0;
}
