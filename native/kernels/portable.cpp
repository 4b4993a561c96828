// Kernels for any CPU: nothing here is specific to one, and -ffp-contract=off keeps every rounding where the source has it.
#include <cstddef>
#include <cstdint>

#include "table.h"

namespace lockstep {
namespace {

#define LOCKSTEP_INSTRUCTION_SET "portable"
constexpr int64_t rows_tile_max = 2;
constexpr int64_t groups_tile = 1;
#include "instruction_set.inc"

}  // namespace

const KernelTable* portable_kernels() { return &table; }

}  // namespace lockstep
