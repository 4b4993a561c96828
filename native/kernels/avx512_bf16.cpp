// Kernels for x86-64 with AVX-512 and its bfloat16 dot products.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "table.h"

namespace lockstep {
namespace {

#define LOCKSTEP_INSTRUCTION_SET "avx512_bf16"
#define LOCKSTEP_FUSED_512
#define LOCKSTEP_BFLOAT16_PRODUCTS
constexpr int64_t rows_tile_max = 6;
constexpr int64_t groups_tile = 4;
#include "instruction_set.inc"

}  // namespace

const KernelTable* avx512_bf16_kernels() { return &table; }

}  // namespace lockstep
