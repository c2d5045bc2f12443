// A recording is four lists in JSON: values, calls, written storages and forked parts. Calls name values by
// slot. The memory of captured tensors and constants is not here: `keep` and `restore` translate a tensor to
// the number of its storage and back. Always: reading checks each slot, storage and count, because a Program
// uses them as indices without a check. Surprising: dispatch keys are not saved. Operators are found by name
// in the LibTorch that loads, and its schema gives the types of arguments.
#include "cohort/script/internal/ir/tape_json.h"

#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cohort/base/error.h"

// Note [Arguments as JSON]
// null, true, 3, 0.5 and "text" are what they are; an integer is never a double. What JSON has no form for is
// an object of one member: {"double": bits as hexadecimal} where it is not finite, {"complex": [re, im]},
// {"device": "cpu"}, {"ints": [...]}, {"doubles": [...]}, {"bools": [...]}, and {"list": [...]}, whose type
// the operator's schema knows. Tensors are {"tensor": slot}, {"tensors": [...]}, {"optional_tensors": [...]}.
namespace cohort::script {
namespace {

using base::concat;
using nlohmann::json;
using ArgumentType = TensorPlace::ArgumentType;

constexpr std::array kKinds = {"tensor", "tensors", "optional_tensors"};    // by TensorPlace::ArgumentType
constexpr std::array kSources = {"input", "captured", "constant", "made"};  // by Source

// JSON has no inf and no NaN. Their bits are written, so that a replay computes with the same ones.
json number(double value) {
  if (std::isfinite(value)) return value;
  std::ostringstream bits;
  bits << std::hex << std::bit_cast<std::uint64_t>(value);
  return {{"double", bits.str()}};
}

double number_of(const json& value) {
  if (!value.is_object()) return value.get<double>();
  return std::bit_cast<double>(std::stoull(value.at("double").get<std::string>(), nullptr, 16));
}

template <typename Values, typename Fn>
json list(const char* kind, const Values& values, const Fn& each) {
  json items = json::array();
  for (auto&& value : values) items.push_back(each(value));
  return {{kind, std::move(items)}};
}

// Empty where it has no form.
std::optional<json> argument(const c10::IValue& value) {
  if (value.isNone()) return json();
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return number(value.toDouble());
  if (value.isString()) return value.toStringRef();
  if (value.isComplexDouble()) {
    const c10::complex<double> complex = value.toComplexDouble();
    return json{{"complex", json::array({number(complex.real()), number(complex.imag())})}};
  }
  if (value.isDevice()) return json{{"device", value.toDevice().str()}};
  // Typed lists first: isList() is true for them too.
  if (value.isIntList()) return json{{"ints", value.toIntVector()}};
  if (value.isDoubleList()) return list("doubles", value.toDoubleVector(), number);
  if (value.isBoolList()) return list("bools", value.toBoolList().vec(), [](bool each) { return each; });
  if (!value.isList()) return std::nullopt;
  json items = json::array();
  for (const c10::IValue& each : value.toListRef()) {
    auto item = argument(each);
    if (!item) return std::nullopt;
    items.push_back(*std::move(item));
  }
  return json{{"list", std::move(items)}};
}

c10::IValue argument_of(const json& value, const c10::TypePtr& type) {
  if (value.is_null()) return {};
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (value.is_number_float() || value.contains("double")) return number_of(value);
  if (value.is_string()) return value.get<std::string>();
  if (value.contains("complex")) {
    const json& parts = value.at("complex");
    return c10::complex<double>(number_of(parts.at(0)), number_of(parts.at(1)));
  }
  if (value.contains("device")) return c10::Device(value.at("device").get<std::string>());
  if (value.contains("ints")) return value.at("ints").get<std::vector<std::int64_t>>();
  if (value.contains("bools")) {
    c10::List<bool> bools;
    for (const json& each : value.at("bools")) bools.push_back(each.get<bool>());
    return bools;
  }
  if (value.contains("doubles")) {
    std::vector<double> doubles;
    for (const json& each : value.at("doubles")) doubles.push_back(number_of(each));
    return doubles;
  }
  // An empty list does not tell the type of its elements, so the schema does.
  const auto optional = type->cast<c10::OptionalType>();
  const auto of = (optional ? optional->getElementType() : type)->expect<c10::ListType>()->getElementType();
  c10::impl::GenericList items(of);
  for (const json& each : value.at("list")) items.push_back(argument_of(each, of));
  return items;
}

json place_json(const TensorPlace& place) {
  const char* const kind = kKinds.at(static_cast<std::size_t>(place.kind));
  json found{{kind, place.kind == ArgumentType::kTensor ? json(place.slots.front()) : json(place.slots)}};
  if (place.fresh_handle) found["fresh_handle"] = true;
  return found;
}

json call_json(const OperatorCall& call) {
  const auto& schema = call.op.schema().arguments();
  json arguments = json::array(), results = json::array();
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    auto found = argument(call.arguments[i]);
    if (!found) {
      throw UsageError("script.save",
                       concat("argument '", schema[i].name(), "' of ", call.name(), " is a ",
                              call.arguments[i].tagKind(), ", which no file can hold"),
                       call.arguments[i].isGenerator() ? "the operator without a generator of its own" : "");
    }
    arguments.push_back(*std::move(found));
  }
  results.get_ref<json::array_t&>().resize(call.num_results);
  for (const TensorPlace& place : call.inputs) arguments[place.index] = place_json(place);
  for (const TensorPlace& place : call.results) results[place.index] = place_json(place);
  json found{{"op", call.op.operator_name().name}, {"in", std::move(arguments)}, {"out", std::move(results)}};
  if (!call.op.operator_name().overload_name.empty()) {
    found["overload"] = call.op.operator_name().overload_name;
  }
  if (call.is_view) found["view"] = true;
  if (call.grad_mode) found["grad_mode"] = true;
  if (!call.below_autocast[0]) found["autocast"] = true;
  if (!call.below_autocast[1]) found["autocast_cuda"] = true;
  return found;
}

json value_json(const Value& value, const std::function<std::size_t(const at::Tensor&)>& keep) {
  const Layout& layout = value.layout;
  json found{{"is", kSources.at(static_cast<std::size_t>(value.source))},
             {"storage", value.storage},
             {"dtype", c10::toString(layout.dtype)},
             {"sizes", layout.sizes},
             {"strides", layout.strides}};
  if (layout.offset != 0) found["offset"] = layout.offset;
  if (!layout.device.is_cpu()) found["device"] = layout.device.str();
  if (layout.conjugate) found["conjugate"] = true;
  if (layout.negative) found["negative"] = true;
  if (value.snapshot) found["snapshot"] = true;
  if (value.tensor.defined()) {
    found["kept"] = keep(value.tensor);
    // A number of C++, 2.0 in x * 2.0, does not decide the type of the result.
    if (value.tensor.unsafeGetTensorImpl()->is_wrapped_number()) found["number"] = true;
  }
  return found;
}

// Reads a recording, checking what replay takes for granted.
class Reader {
 public:
  Reader(const json& from, const std::function<at::Tensor(std::size_t, const Layout&)>& restore,
         const std::string& file)
      : from_(from), restore_(restore), file_(file) {}

  Trace read() {
    // First, since slots() checks each number against it.
    num_values_ = from_.at("values").size();
    const auto written = from_.at("written").get<std::vector<bool>>();
    std::vector<Value> values;
    for (const json& each : from_.at("values")) {
      values.push_back(value(each));
      check(values.back().storage < written.size(), "a value without a storage");
    }
    std::vector<OperatorCall> calls;
    for (const json& each : from_.at("calls")) calls.push_back(call(each));
    Trace trace;
    std::vector<ForkedCalls> forked = this->forked(calls.size());
    trace.tape = Tape(std::move(calls), std::move(values), written, std::move(forked));
    trace.inputs = slots(from_.at("inputs"));
    trace.outputs = slots(from_.at("outputs"));
    trace.needs_gradient.resize(trace.outputs.size());
    trace.handles.resize(trace.outputs.size(), {Handle::AliasType::kDetached});  // results have no graph
    trace.split = trace.tape.calls().size();
    return trace;
  }

 private:
  void check(bool holds, const std::string& what) const {
    if (!holds) throw DataError("script.load", concat(file_, " is no program of script mode: it has ", what));
  }

  std::vector<int> slots(const json& numbers) const {
    auto found = numbers.get<std::vector<int>>();
    for (const int slot : found) {
      check(slot >= kUndefined && slot < static_cast<int>(num_values_), "a slot without a value");
    }
    return found;
  }

  // find_regions() takes for granted that parts are in order and that none lies within another.
  std::vector<ForkedCalls> forked(std::size_t num_calls) const {
    std::vector<ForkedCalls> found;
    for (const json& each : from_.value("forked", json::array())) {
      found.push_back({each.at(0).get<std::size_t>(), each.at(1).get<std::size_t>()});
      const std::size_t before = found.size() == 1 ? 0 : found[found.size() - 2].end;
      check(before <= found.back().begin && found.back().begin <= found.back().end &&
                found.back().end <= num_calls,
            "a forked part of calls that are not there");
    }
    return found;
  }

  Value value(const json& each) const {
    const auto source = std::find(kSources.begin(), kSources.end(), each.at("is").get<std::string>());
    check(source != kSources.end(), concat("a value of kind ", each.at("is").dump()));
    Value value;
    value.source = static_cast<Source>(source - kSources.begin());
    value.storage = each.at("storage").get<std::size_t>();
    Layout& layout = value.layout;
    layout = {.sizes = each.at("sizes").get<std::vector<std::int64_t>>(),
              .strides = each.at("strides").get<std::vector<std::int64_t>>(),
              .offset = each.value("offset", std::int64_t{0}),
              .dtype = scalar_type_of(each.at("dtype").get<std::string>()),
              .device = c10::Device(each.value("device", std::string("cpu"))),
              .conjugate = each.value("conjugate", false),
              .negative = each.value("negative", false)};
    check(layout.sizes.size() == layout.strides.size(), "a value with other sizes than strides");
    value.snapshot = each.value("snapshot", false);
    if (value.source != Source::kCaptured && value.source != Source::kConstant) return value;
    value.tensor = restore_(each.at("kept").get<std::size_t>(), layout);
    if (each.value("number", false)) value.tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return value;
  }

  std::optional<TensorPlace> place(const json& each, std::size_t index) const {
    for (std::size_t kind = 0; each.is_object() && kind < kKinds.size(); ++kind) {
      const auto found = each.find(kKinds.at(kind));
      if (found == each.end()) continue;
      return TensorPlace{.index = index,
                         .kind = static_cast<ArgumentType>(kind),
                         .fresh_handle = each.value("fresh_handle", false),
                         .slots = slots(found->is_array() ? *found : json::array({*found}))};
    }
    return std::nullopt;
  }

  OperatorCall call(const json& each) const {
    const c10::OperatorName name(each.at("op").get<std::string>(), each.value("overload", std::string()));
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) {
      throw DataError("script.load",
                      concat(file_, " uses the operator ", c10::toString(name), ", which is not known here"),
                      "load the library that defines it first (--load LIBRARY, or base::load_plugin)");
    }
    OperatorCall call(*op);
    const json& arguments = each.at("in");
    const json& results = each.at("out");
    const auto& schema = op->schema();
    // Another LibTorch may have added an argument in the middle: a shifted list would compute something else.
    if (arguments.size() != schema.arguments().size() || results.size() != schema.returns().size()) {
      throw DataError("script.load",
                      concat(file_, " calls ", call.name(), " with ", arguments.size(), " arguments for ",
                             results.size(), " results, and here it is ", schema),
                      "the LibTorch, or the library with the operator, that it was saved with");
    }
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      auto tensors = place(arguments[i], i);
      call.arguments.push_back(tensors ? c10::IValue()
                                       : argument_of(arguments[i], schema.arguments()[i].type()));
      if (tensors) call.inputs.push_back(*std::move(tensors));
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (auto tensors = place(results[i], i)) call.results.push_back(*std::move(tensors));
    }
    call.num_results = results.size();
    call.is_view = each.value("view", false);
    call.grad_mode = each.value("grad_mode", false);
    call.below_autocast = {!each.value("autocast", false), !each.value("autocast_cuda", false)};
    return call;
  }

  const json& from_;
  const std::function<at::Tensor(std::size_t, const Layout&)>& restore_;
  const std::string& file_;
  std::size_t num_values_ = 0;
};

}  // namespace

c10::ScalarType scalar_type_of(const std::string& name) {
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<c10::ScalarType>(i);
    if (name == c10::toString(type)) return type;
  }
  throw DataError("script.load", concat("a tensor has the type '", name, "', which this LibTorch has not"));
}

json to_json(const Trace& trace, const std::function<std::size_t(const at::Tensor&)>& keep) {
  json values = json::array(), calls = json::array(), written = json::array(), forked = json::array();
  for (const Value& value : trace.tape.values()) values.push_back(value_json(value, keep));
  for (const OperatorCall& call : trace.tape.calls()) calls.push_back(call_json(call));
  for (std::size_t i = 0; i < trace.tape.num_storages(); ++i) {
    written.push_back(trace.tape.is_written(i));
  }
  for (const ForkedCalls& each : trace.tape.forked()) forked.push_back({each.begin, each.end});
  return {{"inputs", trace.inputs},        {"outputs", trace.outputs},  {"values", std::move(values)},
          {"written", std::move(written)}, {"calls", std::move(calls)}, {"forked", std::move(forked)}};
}

Trace trace_from_json(const json& from,
                      const std::function<at::Tensor(std::size_t storage, const Layout&)>& restore,
                      const std::string& file) {
  return Reader(from, restore, file).read();
}

}  // namespace cohort::script
