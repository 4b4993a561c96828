#include "engine/instruction_sets.h"

#include "engine/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lockstep {
namespace {

struct Features {
  bool avx2 = false, fma = false, avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false, avx512_bf16 = false;
};

#if defined(__x86_64__)
// The registers that the operating system saves on a context switch (XCR0); without them an instruction set must not be used.
uint64_t saved_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

Features read_features() {
  Features f;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return f;
  const uint64_t saved = saved_state();
  const bool ymm = (saved & 0x6) == 0x6, zmm = (saved & 0xe6) == 0xe6;
  f.fma = ymm && (c >> 12 & 1);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  f.avx2 = ymm && (b >> 5 & 1);
  f.avx512f = zmm && (b >> 16 & 1);
  f.avx512dq = zmm && (b >> 17 & 1);
  f.avx512bw = zmm && (b >> 30 & 1);
  f.avx512vl = zmm && (b >> 31 & 1);
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) f.avx512_bf16 = zmm && (a >> 5 & 1);
  return f;
}
#else
Features read_features() { return {}; }
#endif

}  // namespace

std::vector<std::pair<std::string, bool>> cpu_features() {
  const Features f = read_features();
  return {{"avx2", f.avx2},         {"fma", f.fma},           {"avx512f", f.avx512f},        {"avx512bw", f.avx512bw},
          {"avx512dq", f.avx512dq}, {"avx512vl", f.avx512vl}, {"avx512_bf16", f.avx512_bf16}};
}

std::vector<const KernelTable*> usable_kernels() {
  std::vector<const KernelTable*> usable;
  [[maybe_unused]] const Features f = read_features();
  [[maybe_unused]] const bool avx512 = f.avx2 && f.fma && f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl;
#ifdef LOCKSTEP_HAS_AVX512_BF16
  if (avx512 && f.avx512_bf16) usable.push_back(avx512_bf16_kernels());
#endif
#ifdef LOCKSTEP_HAS_AVX512
  if (avx512) usable.push_back(avx512_kernels());
#endif
#ifdef LOCKSTEP_HAS_AVX2
  if (f.avx2 && f.fma) usable.push_back(avx2_kernels());
#endif
  usable.push_back(portable_kernels());
  return usable;
}

const KernelTable* kernels_named(const std::string& name) {
  std::string names;
  for (const KernelTable* table : usable_kernels()) {
    if (name == table->name) return table;
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  fail("instruction set '", name, "' cannot be used on this processor; it can use: ", names);
}

}  // namespace lockstep
