#include "opinfo_values.h"

#include <ATen/ops/eye.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <sstream>

#include "cohort/base/error.h"
#include "opinfo.h"
#include "tests/support/source_dir.h"

namespace cohort::test::opinfo {
namespace {

using base::concat;
using Named = std::map<std::string, std::string>;

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, by);) parts.push_back(part);
  return parts;
}

Named assignments(const std::string& text) {
  Named found;
  std::istringstream in(text);
  for (std::string word; in >> word;) {
    const std::size_t equals = word.find('=');
    found[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return found;
}

// The lines "name, name: argument=value ..." of opinfo_inputs.txt, by name.
std::map<std::string, Named> read_table() {
  std::map<std::string, Named> made;
  std::ifstream in(test::source_dir() / "tests/script/opinfo/opinfo_inputs.txt");
  std::string names;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    const bool continues = line[0] == ' ';
    const std::size_t colon = continues ? 0 : line.find(':');
    if (!continues) names = line.substr(0, colon);
    std::istringstream each(names);
    for (std::string name; std::getline(each >> std::ws, name, ',');) {
      made[name].merge(assignments(line.substr(colon + (continues ? 0 : 1))));
    }
  }
  if (made.empty()) throw std::runtime_error("tests/script/opinfo/opinfo_inputs.txt cannot be read");
  return made;
}

std::vector<std::int64_t> numbers_of(const std::string& text) {
  std::vector<std::int64_t> numbers;
  for (const std::string& part : split(text.substr(1, text.size() - 2), ',')) {
    numbers.push_back(std::stoll(part));
  }
  return numbers;
}

at::Tensor tensor_of(char kind, const std::vector<std::int64_t>& numbers, std::int64_t below = 3) {
  switch (kind) {
    case 'f':
      return at::rand(numbers).mul(0.8).add(0.1);
    case 'd':
      return at::rand(numbers, at::kDouble).mul(0.8).add(0.1);
    case 'c':
      return at::randn(numbers, at::kComplexFloat);
    case 'b':
      return at::rand(numbers).gt(0.5);
    case 'i':
      return at::randint(below, numbers, at::kLong);
    case 'h':
      return at::tensor(numbers, at::kLong);
    case 'j':
      return at::tensor(numbers, at::kInt);
    case 'p':
      return at::rand({numbers.at(0), numbers.at(0)}).add(at::eye(numbers.at(0)), numbers.at(0));
    default:
      throw NoValue(concat("the table of inputs has a tensor of kind ", kind));
  }
}

at::Tensor tensor_of(const std::string& given, std::size_t variant) {
  const auto alternatives = split(given, '|');
  const std::string& text = alternatives[variant % alternatives.size()];
  const std::size_t end = text.find(']') + 1;
  const std::int64_t below = end < text.size() ? std::stoll(text.substr(end + 1)) : 3;
  return tensor_of(text[0], numbers_of(text.substr(1, end - 1)), below);
}

c10::List<at::Tensor> tensors_of(const std::string& text, std::size_t variant) {
  c10::List<at::Tensor> list;
  for (const std::string& part : split(text.substr(1, text.size() - 2), ';')) {
    list.push_back(tensor_of(part, variant));
  }
  return list;
}

c10::IValue list_of_numbers(const std::string& argument, const std::string& base) {
  const Named& table = inputs_of("*list");
  const auto found = table.find(argument);
  auto numbers = numbers_of(found == table.end() ? "[1]" : found->second);
  const std::size_t dimensions = dimensions_in(base);
  constexpr std::array kSpatial = {"kernel_size", "stride",         "padding",
                                   "dilation",    "output_padding", "output_size"};
  if (dimensions > 0 && std::find(kSpatial.begin(), kSpatial.end(), argument) != kSpatial.end()) {
    numbers.assign(dimensions, numbers.front());
    if (base.find(concat("_pad", dimensions)) != std::string::npos) numbers.assign(2 * dimensions, 1);
  }
  if (dimensions > 0 && argument == "input_size") numbers = shape_for(dimensions);
  return numbers;
}

// A value that the table gives, or the table of names.
c10::IValue value_of(const c10::Type& type, const std::string& text, std::size_t variant = 0) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return tensor_of(text, variant);
    case c10::TypeKind::OptionalType:
      return value_of(*type.castRaw<c10::OptionalType>()->getElementType(), text, variant);
    case c10::TypeKind::IntType:
      return static_cast<std::int64_t>(std::stoll(text));
    case c10::TypeKind::FloatType:
      return std::stod(text);
    case c10::TypeKind::BoolType:
      return text == "true";
    case c10::TypeKind::StringType:
      return text.substr(1, text.size() - 2);
    case c10::TypeKind::NumberType:
      if (text.find_first_of(".e") != std::string::npos) return std::stod(text);
      return static_cast<std::int64_t>(std::stoll(text));
    case c10::TypeKind::ListType:
      break;
    default:
      throw NoValue(concat("takes ", type.str()));
  }
  const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
  if (element.kind() == c10::TypeKind::TensorType) return tensors_of(text, variant);
  if (element.kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<at::Tensor>> list;
    for (const at::Tensor& tensor : tensors_of(text, variant)) list.push_back(tensor);
    return list;
  }
  return numbers_of(text);
}

at::Tensor default_tensor(const std::string& argument, const Attempt& attempt) {
  constexpr std::array kIndices = {"index", "indices", "input_lengths", "target_lengths", "offsets"};
  constexpr std::array kMasks = {"mask", "condition"};
  const auto is_in = [&](const auto& list) {
    return std::find(list.begin(), list.end(), argument) != list.end();
  };
  return tensor_of(is_in(kIndices) ? 'i' : is_in(kMasks) ? 'b' : attempt.kind, attempt.shape);
}

c10::IValue default_list(const c10::Argument& argument, const std::string& base, const Attempt& attempt) {
  const c10::Type& element = *argument.type()->castRaw<c10::ListType>()->getElementType();
  switch (element.kind()) {
    case c10::TypeKind::TensorType:
      return c10::List<at::Tensor>(
          {tensor_of(attempt.kind, attempt.shape), tensor_of(attempt.kind, attempt.shape)});
    case c10::TypeKind::OptionalType: {
      c10::List<std::optional<at::Tensor>> list;
      list.push_back(tensor_of('i', {3}));
      return list;
    }
    case c10::TypeKind::IntType:
      return list_of_numbers(argument.name(), base);
    case c10::TypeKind::FloatType:
      return std::vector<double>{0.5, 0.5};
    case c10::TypeKind::BoolType:
      return std::vector<bool>{true, true, true};
    case c10::TypeKind::NumberType:
      return std::vector<at::Scalar>{2, 3};
    default:
      throw NoValue(concat("takes ", argument.type()->str()));
  }
}

}  // namespace

bool is_out(const c10::Argument& argument) {
  return argument.kwarg_only() && argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

std::size_t dimensions_in(const std::string& name) {
  for (std::size_t i = 0; i + 1 < name.size(); ++i) {
    if (name[i] >= '1' && name[i] <= '3' && name[i + 1] == 'd')
      return static_cast<std::size_t>(name[i] - '0');
  }
  return 0;
}

std::vector<std::int64_t> shape_for(std::size_t dimensions) {
  if (dimensions == 1) return {2, 4, 8};
  return dimensions == 2 ? std::vector<std::int64_t>{2, 4, 8, 8} : std::vector<std::int64_t>{2, 2, 4, 4, 4};
}

const std::map<std::string, std::string>& inputs_of(const std::string& name) {
  static const std::map<std::string, Named> table = read_table();
  static const Named none;
  const auto found = table.find(name);
  return found == table.end() ? none : found->second;
}

const std::map<std::string, std::string>& inputs_of(const c10::OperatorName& name) {
  std::vector<std::string> bases = {base_of(name)}, overloads = {name.overload_name};
  if (bases[0].back() == '_') bases.push_back(bases[0].substr(0, bases[0].size() - 1));
  if (overloads[0].ends_with("_out")) overloads.push_back(overloads[0].substr(0, overloads[0].size() - 4));
  std::vector<std::string> keys;
  for (const std::string& base : bases) {
    for (const std::string& overload : overloads) keys.push_back(concat(base, ".", overload));
  }
  keys.insert(keys.end(), bases.begin(), bases.end());
  for (const std::string& key : keys) {
    if (const Named& found = inputs_of(key); !found.empty()) return found;
  }
  return inputs_of("");
}

c10::IValue value_for(const c10::Argument& argument, const c10::OperatorName& name, const Attempt& attempt) {
  const c10::Type& type = *argument.type();
  const Named& given = inputs_of(name);
  if (const auto found = given.find(argument.name()); found != given.end() && !is_out(argument)) {
    return value_of(type, found->second, attempt.variant);
  }
  if (type.kind() == c10::TypeKind::TensorType) return default_tensor(argument.name(), attempt);
  const bool lists_tensors =
      type.kind() == c10::TypeKind::ListType &&
      type.castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
  if (argument.default_value() && !lists_tensors) return *argument.default_value();
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      return {};
    case c10::TypeKind::ListType:
      return default_list(argument, base_of(name), attempt);
    case c10::TypeKind::DeviceObjType:
      return c10::Device(at::kCPU);
    case c10::TypeKind::BoolType:
      return argument.name() == "train" || argument.name() == "training";
    case c10::TypeKind::StringType:
    case c10::TypeKind::IntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::NumberType:
      break;
    default:
      throw NoValue(concat("takes ", type.str()));
  }
  const Named& values = inputs_of(type.kind() == c10::TypeKind::StringType ? "*string" : "*number");
  const auto found = values.find(argument.name());
  if (found != values.end()) return value_of(type, found->second);
  return value_of(type, type.kind() == c10::TypeKind::StringType  ? "'none'"
                        : type.kind() == c10::TypeKind::FloatType ? "0.5"
                                                                  : "1");
}

}  // namespace cohort::test::opinfo
