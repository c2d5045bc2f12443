// Each input element is moved by eps both ways, in a copy, and the central difference is compared with
// backward. Backward runs once for each output element, and twice over, so that a gradient that is not
// repeatable is found. The test is written so that NaN fails it. The second derivative is the first
// derivative of a function. That function returns gradients, and takes the gradients that flow in as further
// inputs.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <iomanip>
#include <sstream>

#include "cohort/base/random.h"
#include "cohort/base/text/format_list.h"
#include "cohort/ops/check.h"

namespace cohort::ops {
namespace {

using Tensors = std::vector<at::Tensor>;

/// "(1, 2)" of a tensor with these sizes; "()" of a scalar.
std::string place_of(std::int64_t element, at::IntArrayRef sizes) {
  std::vector<std::int64_t> index(sizes.size());
  for (std::size_t dim = sizes.size(); dim-- > 0; element /= sizes[dim]) index[dim] = element % sizes[dim];
  return "(" + base::join(index) + ")";
}

/// Where the element lies, whatever the strides.
double* address_of(const at::Tensor& tensor, std::int64_t element) {
  std::int64_t offset = 0;
  for (std::int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    offset += element % tensor.size(dim) * tensor.stride(dim);
    element /= tensor.size(dim);
  }
  return static_cast<double*>(tensor.mutable_data_ptr()) + offset;
}

std::string number(double value) {
  if (std::isnan(value)) return "nan";  // whatever its sign
  std::ostringstream out;
  out << std::setprecision(8) << value;
  return out.str();
}

void check_inputs(const Tensors& inputs, const char* where) {
  bool any = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& input = inputs[i];
    if (!input.defined() || !input.requires_grad()) continue;
    any = true;
    if (input.scalar_type() != at::kDouble || !input.device().is_cpu()) {
      throw UsageError(
          where, base::concat("input ", i, " is ", input.toString(), "; differences want float64 on the CPU"),
          "x.to(at::kDouble).requires_grad_()");
    }
  }
  if (!any) throw UsageError(where, "no input requires a gradient", "x.requires_grad_()");
}

/// The outputs that a gradient can flow into. Throws: CheckError for none.
std::vector<std::size_t> differentiable(const Tensors& outputs, const char* where) {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].defined() && outputs[i].requires_grad()) result.push_back(i);
  }
  if (result.empty()) {
    throw CheckError(where, "no output requires a gradient although an input does",
                     "a backward() for the operator; no detach() and no NoGradGuard on the way");
  }
  return result;
}

/// All elements of the outputs as numbers, by output.
std::vector<std::vector<double>> values_of(const Tensors& outputs, const std::vector<std::size_t>& which) {
  std::vector<std::vector<double>> values;
  for (const std::size_t i : which) {
    const at::Tensor flat = outputs[i].detach().to(at::kDouble).contiguous();
    const auto* begin = flat.const_data_ptr<double>();
    values.emplace_back(begin, begin + flat.numel());
  }
  return values;
}

/// The gradients of one element of an output by every input with a gradient, by LibTorch's engine.
Tensors analytic(const at::Tensor& output, std::int64_t element, const Tensors& by) {
  at::Tensor seed = at::zeros_like(output, at::MemoryFormat::Contiguous);
  {
    const at::NoGradGuard guard;
    seed.view(-1)[element].fill_(1);
  }
  Tensors gradients =
      torch::autograd::grad({output}, by, {seed}, /*retain_graph=*/true, /*create_graph=*/false,
                            /*allow_unused=*/true);
  for (std::size_t i = 0; i < by.size(); ++i) {
    gradients[i] = gradients[i].defined() ? gradients[i].detach().to(at::kDouble).contiguous()
                                          : at::zeros_like(by[i], at::MemoryFormat::Contiguous).detach();
  }
  return gradients;
}

class Check {
 public:
  Check(const TensorFunction& function, const Tensors& inputs, const GradcheckOptions& options,
        const char* where)
      : function_(function), options_(options), where_(where) {
    check_inputs(inputs, where);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const bool wanted = inputs[i].defined() && inputs[i].requires_grad();
      // Copies: what is moved by eps is nobody else's.
      inputs_.push_back(inputs[i].defined() ? inputs[i].detach().clone().set_requires_grad(wanted)
                                            : inputs[i]);
      if (wanted) {
        index_.push_back(i);
        by_.push_back(inputs_.back());
      }
    }
  }

  void run() {
    const at::AutoGradMode grad_mode(true);
    const Tensors outputs = function_(inputs_);
    which_ = differentiable(outputs, where_);
    // rows[input][element][output] holds the numeric derivatives of all elements of that output.
    for (std::size_t i = 0; i < by_.size(); ++i) {
      for (std::int64_t element = 0; element < by_[i].numel(); ++element)
        numeric_.push_back(differences(i, element));
    }
    for (std::size_t k = 0; k < which_.size(); ++k) {
      const at::Tensor& output = outputs[which_[k]];
      for (std::int64_t element = 0; element < output.numel(); ++element) compare(output, k, element);
    }
  }

 private:
  std::vector<std::vector<double>> differences(std::size_t input, std::int64_t element) {
    double* const place = address_of(by_[input], element);
    const double before = *place;
    // Past autograd and its version counts: the graph that was made before is not used in these calls.
    *place = before + options_.eps();
    const auto above = values_of(function_(inputs_), which_);
    *place = before - options_.eps();
    const auto below = values_of(function_(inputs_), which_);
    *place = before;
    std::vector<std::vector<double>> result = above;
    for (std::size_t k = 0; k < result.size(); ++k) {
      for (std::size_t j = 0; j < result[k].size(); ++j) {
        // The error of a central difference is of order eps^2, that of a one-sided one of order eps.
        result[k][j] = (above[k][j] - below[k][j]) / (2 * options_.eps());
      }
    }
    return result;
  }

  void compare(const at::Tensor& output, std::size_t k, std::int64_t out_element) const {
    const Tensors gradients = analytic(output, out_element, by_);
    const Tensors again = analytic(output, out_element, by_);
    std::size_t row = 0;
    for (std::size_t i = 0; i < by_.size(); ++i) {
      for (std::int64_t element = 0; element < by_[i].numel(); ++element, ++row) {
        const double value = gradients[i].const_data_ptr<double>()[element];
        const double expected = numeric_[row][k][static_cast<std::size_t>(out_element)];
        const std::string what =
            base::concat("the gradient of output ", which_[k], " at ", place_of(out_element, output.sizes()),
                         " by input ", index_[i], " at ", place_of(element, by_[i].sizes()));
        const double limit = options_.atol() + options_.rtol() * std::abs(expected);
        // Not (difference > limit), which NaN would pass.
        if (!(std::abs(value - expected) <= limit)) {
          throw CheckError(where_,
                           base::concat(what, ": backward gives ", number(value), ", differences give ",
                                        number(expected), " (allowed ", number(limit), ")"));
        }
        const double twice = again[i].const_data_ptr<double>()[element];
        if (twice != value) {
          throw CheckError(where_, base::concat(what, " is not the same twice: ", number(value), ", then ",
                                                number(twice)));
        }
      }
    }
  }

  const TensorFunction& function_;
  const GradcheckOptions& options_;
  const char* where_;
  Tensors inputs_;
  Tensors by_;                      // the inputs with a gradient
  std::vector<std::size_t> index_;  // of these among all inputs
  std::vector<std::size_t> which_;  // outputs with a gradient
  std::vector<std::vector<std::vector<double>>> numeric_;
};

/// Numbers around 1 that are neither equal nor zero.
at::Tensor drawn_like(const at::Tensor& output, base::RandomStream& random) {
  const at::Tensor result = at::empty_like(output, at::MemoryFormat::Contiguous).detach();
  auto* values = result.mutable_data_ptr<double>();
  // Equal numbers would hide a mistake in their order, and zeros one in any term.
  for (std::int64_t i = 0; i < result.numel(); ++i) values[i] = 0.5 + random.uniform();
  return result;
}

}  // namespace

void gradcheck(const TensorFunction& function, const std::vector<at::Tensor>& inputs,
               const GradcheckOptions& options) {
  Check(function, inputs, options, "ops.gradcheck").run();
}

void gradgradcheck(const TensorFunction& function, const std::vector<at::Tensor>& inputs,
                   const GradcheckOptions& options) {
  const char* where = "ops.gradgradcheck";
  check_inputs(inputs, where);
  const at::AutoGradMode grad_mode(true);
  const std::size_t num_inputs = inputs.size();
  base::RandomStream random(1, 0, 0, base::Purpose::kUser);
  const Tensors outputs = function(inputs);
  const std::vector<std::size_t> which = differentiable(outputs, where);
  Tensors all = inputs;
  for (const std::size_t k : which) all.push_back(drawn_like(outputs[k], random).requires_grad_());
  const TensorFunction gradient = [&](const Tensors& values) {
    const Tensors arguments(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(num_inputs));
    const Tensors flowing(values.begin() + static_cast<std::ptrdiff_t>(num_inputs), values.end());
    const Tensors results = function(arguments);
    Tensors from, by;
    for (const std::size_t k : which) from.push_back(results[k]);
    for (const at::Tensor& argument : arguments) {
      if (argument.defined() && argument.requires_grad()) by.push_back(argument);
    }
    Tensors gradients = torch::autograd::grad(from, by, flowing, /*retain_graph=*/true, /*create_graph=*/true,
                                              /*allow_unused=*/true);
    for (std::size_t i = 0; i < by.size(); ++i) {
      // A gradient that nothing flowed into does not depend on anything.
      if (!gradients[i].defined()) gradients[i] = at::zeros_like(by[i]).detach();
    }
    return gradients;
  };
  Check(gradient, all, options, where).run();
}

}  // namespace cohort::ops
