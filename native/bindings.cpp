// The Python face of the engine: arrays to pointers, nothing else. The only file that knows nanobind.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "engine/error.h"
#include "engine/executable.h"
#include "engine/instruction_sets.h"
#include "engine/probe.h"

namespace nb = nanobind;
using namespace lockstep;

namespace {

template <class T, size_t dimensions>
using Array = nb::ndarray<T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;
using Table = Array<const int32_t, 2>;
// (buffer, array): the array stands in for the buffer.
using BoundArray = std::tuple<int64_t, Array<const float, 2>>;
using Columns = std::tuple<Array<const int32_t, 1>, Array<const uint64_t, 1>, Array<const int32_t, 1>, Array<const float, 1>, Array<const int32_t, 1>,
                           Array<const float, 1>, Array<const float, 1>, Array<const int32_t, 1>, Array<const int32_t, 1>>;
// mask_rows, masks, starts, ids, biases, penalties, subtracts.
using Edits = std::tuple<Array<const int32_t, 1>, Array<const uint32_t, 2>, Array<const int32_t, 1>, Array<const int32_t, 1>, Array<const float, 1>,
                         Array<const float, 1>, Array<const float, 1>>;
// tokens, logprobs, ranks, top_ids, top_logprobs.
using Samples = std::tuple<Array<int32_t, 1>, Array<float, 1>, Array<int32_t, 1>, Array<int32_t, 2>, Array<float, 2>>;

void expect_size(const char* name, size_t wanted, size_t got) {
  if (wanted != got) fail(name, " must have ", wanted, " entries, got ", got);
}

SamplingColumns sampling_of(const Columns& columns) {
  const auto& [index, seeds, positions, temperatures, top_ks, top_ps, min_ps, logprob_counts, targets] = columns;
  const size_t count = index.shape(0);
  expect_size("seeds", count, seeds.shape(0));
  expect_size("sampling positions", count, positions.shape(0));
  expect_size("temperatures", count, temperatures.shape(0));
  expect_size("top_ks", count, top_ks.shape(0));
  expect_size("top_ps", count, top_ps.shape(0));
  expect_size("min_ps", count, min_ps.shape(0));
  expect_size("logprob_counts", count, logprob_counts.shape(0));
  expect_size("targets", count, targets.shape(0));
  return {static_cast<int64_t>(count), index.data(), seeds.data(), positions.data(), temperatures.data(), top_ks.data(), top_ps.data(), min_ps.data(),
          logprob_counts.data(), targets.data()};
}

LogitEdits edits_of(const Edits& edits, size_t count) {
  const auto& [mask_rows, masks, starts, ids, biases, penalties, subtracts] = edits;
  expect_size("mask_rows", count, mask_rows.shape(0));
  expect_size("starts of logit edits", count + 1, starts.shape(0));
  expect_size("biases", ids.shape(0), biases.shape(0));
  expect_size("penalties", ids.shape(0), penalties.shape(0));
  expect_size("subtracts", ids.shape(0), subtracts.shape(0));
  return {mask_rows.data(),
          masks.data(),
          static_cast<int64_t>(masks.shape(0)),
          static_cast<int64_t>(masks.shape(1)),
          starts.data(),
          ids.data(),
          biases.data(),
          penalties.data(),
          subtracts.data(),
          static_cast<int64_t>(ids.shape(0))};
}

void run(Executable& executable, const Array<const int32_t, 1>& token_ids, const Array<const int32_t, 1>& positions,
         const Array<const int32_t, 1>& row_starts, const std::vector<Table>& block_tables, const Columns& columns, const std::optional<Edits>& edits,
         const std::vector<BoundArray>& bound, const Samples& samples) {
  Step step;
  step.tokens = static_cast<int64_t>(token_ids.shape(0));
  expect_size("positions", token_ids.shape(0), positions.shape(0));
  if (row_starts.shape(0) < 1) fail("row_starts must have at least one entry");
  step.rows = static_cast<int64_t>(row_starts.shape(0)) - 1;
  step.token_ids = token_ids.data();
  step.positions = positions.data();
  step.row_starts = row_starts.data();
  for (const Table& table : block_tables) {
    expect_size("a block table (rows)", static_cast<size_t>(step.rows), table.shape(0));
    step.block_tables.push_back({table.data(), static_cast<int64_t>(table.shape(1))});
  }
  step.sampling = sampling_of(columns);
  if (edits) step.edits = edits_of(*edits, static_cast<size_t>(step.sampling.count));
  std::vector<Binding> bindings;
  for (const auto& [buffer, array] : bound) {
    if (static_cast<int64_t>(array.shape(0)) != step.tokens || static_cast<int64_t>(array.shape(1)) != executable.buffer_width(buffer)) {
      fail("an activation array must be [", step.tokens, ", ", executable.buffer_width(buffer), "], got [", array.shape(0), ", ", array.shape(1),
           "]");
    }
    bindings.push_back({buffer, const_cast<float*>(array.data())});
  }
  const auto& [tokens, logprobs, ranks, top_ids, top_logprobs] = samples;
  const auto count = static_cast<size_t>(step.sampling.count);
  expect_size("tokens", count, tokens.shape(0));
  expect_size("logprobs", count, logprobs.shape(0));
  expect_size("ranks", count, ranks.shape(0));
  expect_size("top_ids", count, top_ids.shape(0));
  expect_size("top_logprobs", count, top_logprobs.shape(0));
  expect_size("top_logprobs (columns)", top_ids.shape(1), top_logprobs.shape(1));
  const SampleColumns out{tokens.data(), logprobs.data(), ranks.data(), top_ids.data(), top_logprobs.data(), static_cast<int64_t>(top_ids.shape(1))};
  const nb::gil_scoped_release released;
  executable.run(step, bindings, out);
}

std::shared_ptr<PackedWeight> pack(WeightArena& arena, const Array<const float, 2>& values, DType dtype, Layout layout) {
  const nb::gil_scoped_release released;
  return std::make_shared<PackedWeight>(
      pack_weight(arena, values.data(), static_cast<int64_t>(values.shape(0)), static_cast<int64_t>(values.shape(1)), dtype, layout));
}

void read_buffer(const Executable& executable, int64_t buffer, const Array<float, 2>& out) {
  const auto rows = static_cast<int64_t>(out.shape(0)), width = static_cast<int64_t>(out.shape(1));
  if (rows > executable.buffer_rows_max(buffer) || width != executable.buffer_width(buffer)) {
    fail("a buffer of at most ", executable.buffer_rows_max(buffer), " rows of ", executable.buffer_width(buffer), ", asked for ", rows, " of ",
         width);
  }
  std::copy_n(executable.buffer_data(buffer), rows * width, out.data());
}

// exp, log, tanh or Gumbel noise by one instruction set's own code, for tests of its accuracy.
void elementwise(const std::string& instruction_set, const std::string& function, const Array<const float, 1>& x, const Array<float, 1>& out) {
  expect_size("out", x.shape(0), out.shape(0));
  const KernelTable* kernels = kernels_named(instruction_set);
  if (function == "exp") return kernels->exp_of(x.data(), static_cast<int64_t>(x.shape(0)), out.data());
  if (function == "log") return kernels->log_of(x.data(), static_cast<int64_t>(x.shape(0)), out.data());
  if (function == "tanh") return kernels->tanh_of(x.data(), static_cast<int64_t>(x.shape(0)), out.data());
  fail("function must be exp, log or tanh, got ", function);
}

void gumbel(const std::string& instruction_set, const Array<const uint32_t, 1>& ids, uint64_t seed, uint32_t position, const Array<float, 1>& out) {
  expect_size("out", ids.shape(0), out.shape(0));
  kernels_named(instruction_set)->gumbel_of(ids.data(), static_cast<int64_t>(ids.shape(0)), seed, position, out.data());
}

void log_of_unit(const std::string& instruction_set, const Array<const uint32_t, 1>& w, const Array<float, 1>& out) {
  expect_size("out", w.shape(0), out.shape(0));
  kernels_named(instruction_set)->log_of_unit(w.data(), static_cast<int64_t>(w.shape(0)), out.data());
}

}  // namespace

NB_MODULE(_kernels, m) {
  nb::exception<EngineError>(m, "EngineError");
  nb::enum_<DType>(m, "DType").value("float32", DType::float32).value("bfloat16", DType::bfloat16).value("int8", DType::int8);
  nb::enum_<Layout>(m, "Layout").value("panels", Layout::panels).value("rows", Layout::rows).value("vector", Layout::vector);
  nb::enum_<OpKind>(m, "OpKind")
      .value("embed", OpKind::embed)
      .value("rms_norm", OpKind::rms_norm)
      .value("linear", OpKind::linear)
      .value("head_linear", OpKind::head_linear)
      .value("rope_write", OpKind::rope_write)
      .value("latent_write", OpKind::latent_write)
      .value("paged_attention", OpKind::paged_attention)
      .value("gated_activation", OpKind::gated_activation)
      .value("soft_cap", OpKind::soft_cap)
      .value("route", OpKind::route)
      .value("experts", OpKind::experts)
      .value("select", OpKind::select)
      .value("sample", OpKind::sample);
  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::silu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("clamped_silu", Activation::clamped_silu);

  nb::class_<PackedWeight>(m, "PackedWeight").def_prop_ro("nbytes", [](const PackedWeight& weight) { return weight.bytes; });
  nb::class_<WeightArena>(m, "WeightArena").def(nb::init<>()).def("pack", &pack, nb::arg("values").noconvert(), nb::arg("dtype"), nb::arg("layout"));

  nb::class_<OpCall>(m, "OpCall")
      .def(
          "__init__",
          [](OpCall* self, OpKind kind, int64_t input, int64_t output, std::shared_ptr<PackedWeight> weight, std::shared_ptr<PackedWeight> bias,
             bool accumulate, float number, int64_t kv_layer, int64_t heads, float scale, float offset, int64_t column, int64_t groups,
             int64_t window, float soft_cap, Activation activation, int64_t second, int64_t expert_count, int64_t top_k, bool sigmoid,
             bool renormalise, int64_t groups_kept, int64_t group_best, int64_t passed, std::shared_ptr<PackedWeight> gate_up_bias,
             std::shared_ptr<PackedWeight> down_bias) {
            new (self) OpCall{kind,  input,  output, std::move(weight), std::move(bias), accumulate, number,    kv_layer, heads,
                              scale, offset, column, groups,            window,          soft_cap,   activation, second, expert_count,
                              top_k, sigmoid, renormalise, groups_kept, group_best, passed, std::move(gate_up_bias), std::move(down_bias)};
          },
          nb::kw_only(), nb::arg("kind"), nb::arg("input") = -1, nb::arg("output") = -1, nb::arg("weight").none() = nb::none(),
          nb::arg("bias").none() = nb::none(), nb::arg("accumulate") = false, nb::arg("number") = 0.0f, nb::arg("kv_layer") = -1,
          nb::arg("heads") = 0, nb::arg("scale") = 1.0f, nb::arg("offset") = 0.0f, nb::arg("column") = 0, nb::arg("groups") = 0,
          nb::arg("window") = 0, nb::arg("soft_cap") = 0.0f, nb::arg("activation") = Activation::silu, nb::arg("second") = -1,
          nb::arg("expert_count") = 0, nb::arg("top_k") = 0, nb::arg("sigmoid") = false, nb::arg("renormalise") = false, nb::arg("groups_kept") = 0,
          nb::arg("group_best") = 0, nb::arg("passed") = 0, nb::arg("gate_up_bias").none() = nb::none(), nb::arg("down_bias").none() = nb::none());

  nb::class_<Executable>(m, "Executable")
      .def(
          "__init__",
          [](Executable* self, const std::string& instruction_set, DType dtype, DType kv_dtype, std::tuple<int64_t, int64_t, int64_t, int64_t> limits,
             std::vector<int64_t> block_counts, int64_t threads, const std::vector<std::pair<bool, int64_t>>& buffers,
             const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>& kv_layers, const std::vector<OpCall>& ops) {
            const auto [tokens, rows, samples, block_size] = limits;
            std::vector<BufferShape> shapes;
            for (const auto& [by_sample, width] : buffers) shapes.push_back({by_sample, width});
            std::vector<KVLayerShape> layers;
            for (const auto& [kv_heads, head_dim, group, latent] : kv_layers) layers.push_back({kv_heads, head_dim, group, latent});
            new (self) Executable(kernels_named(instruction_set), dtype, kv_dtype, Limits{tokens, rows, samples, block_size, std::move(block_counts)}, threads,
                                  std::move(shapes), std::move(layers), ops);
          },
          nb::kw_only(), nb::arg("instruction_set"), nb::arg("dtype"), nb::arg("kv_dtype"), nb::arg("limits"), nb::arg("block_counts"), nb::arg("threads"),
          nb::arg("buffers"), nb::arg("kv_layers"), nb::arg("ops"))
      // Arrays are taken as they are or refused: a converted copy would swallow what is written to it.
      .def("run", &run, nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(), nb::arg("row_starts").noconvert(),
           nb::arg("block_tables").noconvert(), nb::arg("sampling").noconvert(), nb::arg("edits").noconvert().none(), nb::arg("bound").noconvert(),
           nb::arg("samples").noconvert())
      .def("read_buffer", &read_buffer, nb::arg("buffer"), nb::arg("out").noconvert())
      .def_prop_ro("kv_bytes", &Executable::kv_bytes);

  m.def("cpu_features", &cpu_features);
  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const KernelTable* table : usable_kernels()) names.emplace_back(table->name);
    return names;
  });
  m.def(
      "numerics_probe", [](const std::string& instruction_set) { return numerics_probe(*kernels_named(instruction_set)); },
      nb::arg("instruction_set"));
  m.def("philox4x32", &philox4x32, nb::arg("counter"), nb::arg("key"));
  m.def("elementwise", &elementwise, nb::arg("instruction_set"), nb::arg("function"), nb::arg("x").noconvert(), nb::arg("out").noconvert());
  m.def("log_of_unit", &log_of_unit, nb::arg("instruction_set"), nb::arg("w").noconvert(), nb::arg("out").noconvert());
  m.def("gumbel", &gumbel, nb::arg("instruction_set"), nb::arg("ids").noconvert(), nb::arg("seed"), nb::arg("position"), nb::arg("out").noconvert());
}
