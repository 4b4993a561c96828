// Which kernel tables were built, which of them this processor can run, and what it says of itself.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernels/table.h"

namespace lockstep {

// (feature, present) for what the kernels look for.
std::vector<std::pair<std::string, bool>> cpu_features();

// Tables that run here, best first; the last is always "portable".
std::vector<const KernelTable*> usable_kernels();

// The usable table of that name; throws EngineError naming those there are.
const KernelTable* kernels_named(const std::string& name);

}  // namespace lockstep
