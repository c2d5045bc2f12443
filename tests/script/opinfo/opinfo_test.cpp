#include "opinfo.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randn_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>

#include "cohort/base/error.h"
#include "cohort/script/function.h"
#include "opinfo_values.h"
#include "tests/script/same_bits.h"
#include "tests/support/source_dir.h"

namespace cohort::script {
namespace {

using base::concat;
using test::same_bits;
namespace opinfo = test::opinfo;
using Run = std::function<Tensors(const Tensors&)>;

enum class Verdict : std::uint8_t { kSame, kRejected, kDiffers, kNotCalled };

// What script mode made of an operator.
struct Sighting {
  std::string name = {};
  Verdict verdict = Verdict::kNotCalled;
  std::string reason = {};
  bool has_gradient = false;  // and its backward is the same too
  std::size_t num_fixed = 0;  // inputs that had the same elements in all calls
};

// Everything that a call leaves.
struct Trace {
  Tensors results, inputs, gradients;
  at::Tensor generator;
};

bool starts_with(const std::string& text, std::string_view prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

// Operators that leave memory as it comes: sizes and type are all that can be the same.
bool is_uninitialized(const std::string& base) {
  return base == "_make_dep_token" || starts_with(base, "empty") || starts_with(base, "_empty") ||
         starts_with(base, "new_empty") || starts_with(base, "resize") || starts_with(base, "_resize");
}

bool same(const Tensors& a, const Tensors& b, bool uninitialized) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined()) return false;
    if (!a[i].defined()) continue;
    if (a[i].sizes() != b[i].sizes() || a[i].scalar_type() != b[i].scalar_type()) return false;
    if (a[i].layout() != b[i].layout()) return false;
    if (a[i].layout() != at::kStrided || uninitialized) continue;
    if (a[i].strides() != b[i].strides() || a[i].is_conj() != b[i].is_conj()) return false;
    if (!same_bits(a[i], b[i])) return false;
  }
  return true;
}

Trace call(const Run& run, const opinfo::Case& sample, bool with_gradient) {
  Trace trace;
  for (const at::Tensor& tensor : sample.inputs()) {
    at::Tensor& copy = trace.inputs.emplace_back(tensor.clone());
    if (with_gradient && (copy.is_floating_point() || copy.is_complex())) copy.requires_grad_();
  }
  at::manual_seed(11);
  trace.results = run(trace.inputs);
  if (with_gradient) {
    Tensors ends, grad_outputs, leaves;
    for (const at::Tensor& result : trace.results) {
      if (!result.defined() || !result.requires_grad()) continue;
      ends.push_back(result);
      grad_outputs.push_back(at::randn_like(result));
    }
    for (const at::Tensor& input : trace.inputs) {
      if (input.requires_grad()) leaves.push_back(input);
    }
    trace.gradients =
        torch::autograd::grad(ends, leaves, grad_outputs, std::nullopt, false, /*allow_unused=*/true);
  }
  trace.generator = at::globalContext().defaultGenerator(at::kCPU).get_state();
  return trace;
}

std::string difference(const Trace& eager, const Trace& scripted, bool uninitialized) {
  if (!same(eager.results, scripted.results, uninitialized)) return "other results";
  if (!same(eager.inputs, scripted.inputs, uninitialized)) return "other effects on its inputs";
  if (!same(eager.gradients, scripted.gradients, uninitialized)) return "other gradients";
  if (!same_bits(eager.generator, scripted.generator)) return "the generator stands elsewhere";
  return "";
}

// Records `run` twice, and replays it on the same inputs and on others of the same shapes. No call is
// verified: the function itself would run, not the replay.
Sighting watch(const Run& run, const opinfo::Found& found, bool uninitialized, bool with_gradient) {
  Sighting seen;
  Function fast(run, ScriptOptions().max_programs(1).min_operators(0).verify(false));
  const auto compare = [&](const opinfo::Case& sample, const char* what) {
    const Trace eager = call(run, sample, with_gradient);
    const std::string differs = difference(eager, call(std::ref(fast), sample, with_gradient), uninitialized);
    if (differs.empty()) return;
    seen = {.verdict = Verdict::kDiffers, .reason = concat(what, ": ", differs)};
  };
  try {
    const opinfo::Case& first = found.cases.front();
    if (!difference(call(run, first, with_gradient), call(run, first, with_gradient), uninitialized)
             .empty()) {
      return {.reason = "eager mode itself has other results each time"};
    }
    for (int i = 1; i <= 7; ++i) compare(first, i <= 2 ? "recording" : "replay");
    for (const opinfo::Case& sample : found.cases) compare(sample, "replay with other values");
  } catch (const std::exception& error) {
    return {.verdict = Verdict::kDiffers, .reason = concat("throws ", error.what())};
  }
  if (seen.verdict == Verdict::kDiffers) return seen;
  const std::string explained = fast.explain();
  const std::size_t eager = explained.find("eager: ");
  if (explained.find("program: ") != std::string::npos) return {.verdict = Verdict::kSame};
  if (eager == std::string::npos) return {.verdict = Verdict::kDiffers, .reason = explained};
  return {.verdict = Verdict::kRejected,
          .reason = explained.substr(eager + 7, explained.find('\n', eager) - eager - 7)};
}

// True if the operator can be differentiated as it was called.
bool has_gradient(const opinfo::Case& sample) {
  for (std::size_t i = 0; i < sample.inputs().size(); ++i) {
    if (sample.is_written()[i]) return false;
  }
  try {
    const Trace trace = call(sample, sample, /*with_gradient=*/true);
    for (const at::Tensor& gradient : trace.gradients) {
      if (gradient.defined()) return true;
    }
  } catch (const std::exception&) {
  }
  return false;
}

Sighting watch(const c10::OperatorName& name) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
  const bool uninitialized = is_uninitialized(opinfo::base_of(name));
  const opinfo::Found found = opinfo::find_inputs(op);
  Sighting seen;
  if (found.cases.empty()) {
    seen.reason = found.reason;
  } else {
    const Run run = [&](const Tensors& inputs) { return found.cases.front()(inputs); };
    {
      const at::NoGradGuard no_grad;
      seen = watch(run, found, uninitialized, false);
    }
    if (seen.verdict == Verdict::kSame && has_gradient(found.cases.front())) {
      const Sighting backward = watch(run, found, uninitialized, true);
      if (backward.verdict == Verdict::kDiffers) {
        seen = backward;
        seen.reason = concat("with gradients, ", seen.reason);
      }
      seen.has_gradient = backward.verdict == Verdict::kSame;
    }
  }
  seen.name = opinfo::text_of(name).substr(6);
  if (!found.cases.empty()) seen.num_fixed = found.fixed_inputs().size();
  return seen;
}

using ByVerdict = std::map<Verdict, std::vector<Sighting>>;

ByVerdict watch_all() {
  ByVerdict seen;
  for (const c10::OperatorName& name : opinfo::names()) {
    Sighting sighting = watch(name);
    seen[sighting.verdict].push_back(std::move(sighting));
  }
  return seen;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text, line;
  for (const std::string& name : names) {
    if (line.size() + name.size() > 116) {
      text += line + "\n";
      line.clear();
    }
    line += concat(line.empty() ? "" : " ", "`", name, "`");
  }
  return text + line + "\n";
}

std::string document(ByVerdict& seen) {
  std::size_t with_gradient = 0;
  std::vector<std::string> same_names;
  std::map<std::string, std::vector<std::string>> rejected, not_called;
  for (const Sighting& sighting : seen[Verdict::kSame]) {
    same_names.push_back(sighting.name + (sighting.has_gradient ? "*" : ""));
    with_gradient += sighting.has_gradient ? 1 : 0;
  }
  for (const Sighting& sighting : seen[Verdict::kRejected])
    rejected[sighting.reason].push_back(sighting.name);
  for (const Sighting& sighting : seen[Verdict::kNotCalled]) {
    const bool no_kernel =
        starts_with(sighting.reason, "Could not run") || sighting.reason.find("not implemented") < 99;
    not_called[no_kernel ? "no kernel for these tensors on the CPU" : sighting.reason].push_back(
        sighting.name);
  }
  std::string text = concat(
      "# Operators in script mode\n\n"
      "Written by `tests/script/opinfo/opinfo_test.cpp`, which takes every operator of LibTorch's dispatcher "
      "in "
      "namespace "
      "`aten`, makes inputs from its schema,\nrecords it twice, replays it on the same inputs and on others, "
      "and "
      "compares results, effects, gradients and the random generator bit by bit.\n\n"
      "LibTorch ",
      TORCH_VERSION, ", CPU: ", seen[Verdict::kSame].size(), " replay bit for bit, ", with_gradient,
      " of them with their backward (marked *); ", seen[Verdict::kRejected].size(), " are rejected; ",
      seen[Verdict::kDiffers].size(), " differ; ", seen[Verdict::kNotCalled].size(),
      " were not called.\n\n## Rejected\n\n");
  for (const auto& [reason, names] : rejected) text += concat(reason, ":\n", joined(names), "\n");
  text += "## Replayed bit for bit\n\n" + joined(same_names);
  text += "\n## Not called\n\n";
  for (const auto& [reason, names] : not_called) text += concat(reason, ":\n", joined(names), "\n");
  return text;
}

// The names between backticks of a page's section.
std::set<std::string> names_in(const std::string& page, const std::string& title) {
  const std::size_t begin = page.find("## " + title);
  std::istringstream section(
      begin == std::string::npos ? "" : page.substr(begin, page.find("\n## ", begin) - begin));
  std::set<std::string> names;
  for (std::string before, name; std::getline(section, before, '`') && std::getline(section, name, '`');) {
    names.insert(name);
  }
  return names;
}

// What docs/reference/script_operators.md promises. On another CPU a kernel may be missing, so what could not
// be called here is passed over; as are operators that leave memory as it comes, since what comes decides
// whether the recorder takes it for filled by C++.
void expect_as_documented(const ByVerdict& seen) {
  const auto path = cohort::test::source_dir() / "docs" / "reference" / "script_operators.md";
  std::stringstream page;
  page << std::ifstream(path).rdbuf();
  if (page.str().find("LibTorch " TORCH_VERSION ", CPU") == std::string::npos) return;
  const auto replayed = names_in(page.str(), "Replayed bit for bit"),
             rejected = names_in(page.str(), "Rejected");
  EXPECT_GE(replayed.size(), 2000U);
  const auto depends_on_memory = [](const Sighting& sighting) {
    return is_uninitialized(sighting.name.substr(0, sighting.name.find('.')));
  };
  constexpr const char* kHint =
      "; if that is meant, COHORT_WRITE_OPERATORS=docs/reference/script_operators.md";
  for (const Sighting& sighting : seen.at(Verdict::kRejected)) {
    if (depends_on_memory(sighting)) continue;
    EXPECT_EQ(rejected.count(sighting.name), 1U)
        << sighting.name << " is rejected, and documented otherwise: " << sighting.reason << kHint;
  }
  for (const Sighting& sighting : seen.at(Verdict::kSame)) {
    if (depends_on_memory(sighting)) continue;
    EXPECT_EQ(rejected.count(sighting.name), 0U)
        << sighting.name << " replays, and is documented as rejected" << kHint;
    EXPECT_TRUE(sighting.has_gradient || replayed.count(sighting.name + "*") == 0)
        << sighting.name << " is documented as replaying its backward too" << kHint;
  }
}

// Every other operator saw other elements in each of its inputs than those that it was recorded with.
void expect_inputs_vary(const ByVerdict& seen) {
  const auto& known = opinfo::inputs_of("*fixed");
  std::size_t num_known = 0;
  for (const auto& [verdict, operators] : seen) {
    for (const Sighting& sighting : operators) {
      const bool may = known.count(sighting.name) != 0;
      num_known += may ? 1 : 0;
      EXPECT_EQ(sighting.num_fixed != 0, may)
          << sighting.name
          << ": tests/script/opinfo/opinfo_inputs.txt has to give alternatives, or the reason under *fixed";
    }
  }
  EXPECT_EQ(num_known, known.size()) << "opinfo_inputs.txt names an operator under *fixed that there is none";
}

TEST(OpinfoTest, OperatorsReplayBitForBitOrAreRejectedWithAReason) {
  ByVerdict seen = watch_all();
  const std::string text = document(seen);
  for (const Sighting& sighting : seen[Verdict::kDiffers])
    ADD_FAILURE() << sighting.name << ": " << sighting.reason;
  EXPECT_GE(seen[Verdict::kSame].size(), 2000U) << text;  // LibTorch 2.13: 2375
  EXPECT_GE(seen[Verdict::kRejected].size(), 50U) << text;
  expect_inputs_vary(seen);
  expect_as_documented(seen);
  if (const char* const path = std::getenv("COHORT_WRITE_OPERATORS")) std::ofstream(path) << text;
}

}  // namespace
}  // namespace cohort::script
