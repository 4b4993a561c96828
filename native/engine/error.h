// The one exception that the engine throws on purpose: a step or a program that must not run. Its message names the values.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace lockstep {

struct EngineError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw EngineError(text.str());
}

}  // namespace lockstep
