#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/source_dir.h"

/// Parameters and gradients as in tests/optim/golden/optim.py.
namespace cohort::test {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline const std::vector<std::vector<std::int64_t>> kShapes = {{5, 3, 2, 2}, {37}, {130}};

inline at::Tensor value(std::size_t p, std::int64_t salt) {
  std::int64_t n = 1;
  for (std::int64_t size : kShapes[p]) n *= size;
  std::vector<float> values;
  for (std::int64_t i = 0; i < n; ++i)
    values.push_back(static_cast<float>((i * 29 + static_cast<std::int64_t>(p) * 7 + salt * 11) % 23 - 11) /
                     8);
  return at::from_blob(values.data(), kShapes[p], at::kFloat).clone();
}

inline std::vector<at::Tensor> fresh_parameters() {
  std::vector<at::Tensor> parameters;
  for (std::size_t p = 0; p < kShapes.size(); ++p) parameters.push_back(value(p, 0).set_requires_grad(true));
  return parameters;
}

/// Gradients of step `step` (from 1); the second parameter has none in steps 2 and 3.
inline void set_gradients(std::vector<at::Tensor>& parameters, std::int64_t step) {
  for (std::size_t p = 0; p < parameters.size(); ++p)
    parameters[p].mutable_grad() = p == 1 && (step == 2 || step == 3) ? at::Tensor() : value(p, step);
}

/// Lines of a golden file by their first word, each split into words.
inline std::map<std::string, std::vector<std::vector<std::string>>> read_golden(const std::string& name) {
  std::ifstream file(test::source_dir() / "tests/optim/golden" / name);
  if (!file) throw std::runtime_error("no golden file " + name);
  std::map<std::string, std::vector<std::vector<std::string>>> lines;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key, word;
    words >> key;
    std::vector<std::string> rest;
    while (words >> word) rest.push_back(word);
    lines[key].push_back(rest);
  }
  return lines;
}

/// The golden tensors of one case, flat and in double.
inline std::vector<at::Tensor> golden_tensors(const std::string& name) {
  std::vector<at::Tensor> tensors;
  const auto golden = read_golden("steps.txt");
  for (const auto& words : golden.at(name)) {
    std::vector<double> values;
    for (std::size_t k = 1; k < words.size(); ++k) values.push_back(std::stod(words[k]));
    tensors.push_back(
        at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())}, at::kDouble).clone());
  }
  return tensors;
}

/// Bitwise, with equal sizes.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.detach(), b.detach());
}

}  // namespace cohort::test
