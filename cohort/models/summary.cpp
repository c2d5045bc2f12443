// The model runs once on zeros, and an observer gets each layer's call, with its input and output. FLOPs
// follow from these shapes and the layer's type; a layer that is called again counts its parameters once.
// Parameters and buffers of the model are counted from the module itself, whether or not its layers were
// seen.
#include "cohort/models/summary.h"

#include <ATen/ops/zeros.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <unordered_set>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/core/module_type.h"
#include "cohort/models/observer.h"

namespace cohort::models {
namespace {

namespace nn = torch::nn;

std::int64_t product(at::IntArrayRef sizes) {
  std::int64_t result = 1;
  for (const std::int64_t size : sizes) result *= size;
  return result;
}

struct OperationCount {
  std::int64_t flops = 0;
  std::int64_t multiply_adds = 0;
};

/// One of LibTorch's, or one that was put in its place (SyncBatchNorm), which has its statistics.
bool is_batch_norm(const nn::Module& layer) {
  return layer.as<nn::BatchNorm2dImpl>() != nullptr ||
         layer.named_buffers(/*recurse=*/false).contains("running_mean");
}

OperationCount work_of(const nn::Module& layer, const at::Tensor& input, const at::Tensor& output) {
  // A multiply-add is two operations. Biases are left out, as papers do when they quote FLOPs.
  const auto multiply_adds = [&](std::int64_t per_value) {
    return OperationCount{2 * per_value * output.numel(), per_value * output.numel()};
  };
  if (const auto* convolution = layer.as<nn::Conv2dImpl>()) {
    // Weights of one output channel: kernel area times input channels of its group.
    return multiply_adds(convolution->weight.numel() / convolution->weight.size(0));
  }
  if (const auto* linear = layer.as<nn::LinearImpl>()) return multiply_adds(linear->weight.size(1));
  // In evaluation mode statistics are constants: a scale and a shift for each value.
  if (is_batch_norm(layer)) return {2 * output.numel(), 0};
  if (layer.as<nn::ReLUImpl>() != nullptr) return {output.numel(), 0};
  if (const auto* pool = layer.as<nn::MaxPool2dImpl>()) {
    return {product(*pool->options.kernel_size()) * output.numel(), 0};
  }
  if (layer.as<nn::AdaptiveAvgPool2dImpl>() != nullptr) return {std::max(input.numel(), output.numel()), 0};
  return {};
}

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

std::int64_t count_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t count = 0;
  for (const at::Tensor& tensor : tensors) count += tensor.numel();
  return count;
}

LayerRow describe(const std::string& name, const nn::Module& layer) {
  return {name,
          core::module_type(layer),
          {},
          count_of(layer.parameters()),
          bytes_of(layer.parameters()) + bytes_of(layer.buffers()),
          0};
}

/// Puts a module back into the mode it was in.
class EvaluationMode {
 public:
  explicit EvaluationMode(nn::Module& module) {
    // Modes are kept one by one: part of a model may be frozen in evaluation mode.
    for (const auto& part : module.modules()) modes_.emplace_back(part.get(), part->is_training());
    module.eval();
  }
  ~EvaluationMode() {
    // From the root down, so that a part that differed from its parent gets its own mode last.
    for (const auto& [part, training] : modes_) part->train(training);
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  std::vector<std::pair<nn::Module*, bool>> modes_;
};

void list_leaves(const nn::Module& module, ModelSummary& summary) {
  for (const auto& part : module.named_modules("", /*include_self=*/true)) {
    if (part.value()->children().empty()) summary.rows.push_back(describe(part.key(), *part.value()));
  }
}

void add_totals(const nn::Module& module, ModelSummary& summary) {
  const auto parameters = module.parameters();
  const auto buffers = module.buffers();
  summary.num_parameters = count_of(parameters);
  summary.num_buffers = count_of(buffers);
  summary.parameter_bytes = bytes_of(parameters);
  summary.buffer_bytes = bytes_of(buffers);
  for (const at::Tensor& parameter : parameters) {
    if (parameter.requires_grad()) summary.num_trainable_parameters += parameter.numel();
  }
}

}  // namespace

ModelSummary summarize(nn::AnyModule& model, at::IntArrayRef input_shape) {
  const auto module = model.ptr();
  ModelSummary summary;
  summary.type = core::module_type(*module);
  summary.input_shape = input_shape.vec();
  std::unordered_set<const nn::Module*> seen;
  const at::NoGradGuard no_grad;
  const EvaluationMode evaluation(*module);
  const LayerObserver observer(*module, [&](const std::string& name, const nn::Module& layer,
                                            const at::Tensor& input, const at::Tensor& output) {
    LayerRow row = describe(name, layer);
    // The row stays, as the call took its time; only its parameters are counted already.
    if (!seen.insert(&layer).second) row.num_parameters = row.num_bytes = 0;
    const OperationCount work = work_of(layer, input, output);
    row.output_shape = output.sizes().vec();
    row.flops = work.flops;
    summary.flops += work.flops;
    summary.multiply_adds += work.multiply_adds;
    // The output of a layer that works in place counts too, though it takes no memory of its own.
    summary.activation_bytes += static_cast<std::int64_t>(output.nbytes());
    summary.rows.push_back(std::move(row));
  });
  const auto parameters = module->parameters();
  // The type and device of the first parameter: what the model itself computes with.
  const auto options = parameters.empty() ? at::TensorOptions() : parameters.front().options();
  const at::Tensor output = model.forward(at::zeros(input_shape, options.requires_grad(false)));
  summary.output_shape = output.sizes().vec();
  summary.observed = !summary.rows.empty();
  // Without reports the table has at least the parameters. Shapes and FLOPs are "?", not 0.
  if (!summary.observed) list_leaves(*module, summary);
  add_totals(*module, summary);
  return summary;
}

namespace {

std::string grouped(std::int64_t value) {
  std::string digits = std::to_string(value);
  for (auto place = static_cast<std::ptrdiff_t>(digits.size()) - 3; place > 0; place -= 3) {
    digits.insert(static_cast<std::size_t>(place), ",");
  }
  return digits;
}

std::string shape_text(at::IntArrayRef shape) {
  return shape.empty() ? "?" : base::join(shape, " x ");
}

/// 1234567 with unit "FLOPs" becomes "1.23 MFLOPs".
std::string scaled_text(std::int64_t value, const char* unit) {
  constexpr std::array<const char*, 5> kPrefixes{"", "k", "M", "G", "T"};
  auto number = static_cast<double>(value);
  std::size_t prefix = 0;
  while (number >= 1000 && prefix + 1 < kPrefixes.size()) {
    number /= 1000;
    ++prefix;
  }
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), prefix == 0 ? "%.0f %s%s" : "%.2f %s%s", number, kPrefixes[prefix],
                unit);
  return text.data();
}

using Line = std::array<std::string, 6>;

std::string aligned(const std::vector<Line>& lines) {
  std::array<std::size_t, 6> widths{};
  for (const Line& line : lines) {
    for (std::size_t column = 0; column < line.size(); ++column) {
      widths[column] = std::max(widths[column], line[column].size());
    }
  }
  std::string text;
  for (const Line& line : lines) {
    for (std::size_t column = 0; column < line.size(); ++column) {
      const std::string padding(widths[column] - line[column].size(), ' ');
      const bool left = column < 3;
      text += left ? line[column] + padding : padding + line[column];
      text += column + 1 < line.size() ? "  " : "\n";
    }
  }
  return text;
}

}  // namespace

std::string to_text(const ModelSummary& summary) {
  std::vector<Line> lines{{"layer", "type", "output", "parameters", "bytes", "FLOPs"}};
  for (const LayerRow& row : summary.rows) {
    lines.push_back({row.name, row.type, shape_text(row.output_shape), grouped(row.num_parameters),
                     grouped(row.num_bytes), summary.observed ? grouped(row.flops) : "?"});
  }
  std::string text = base::concat(summary.type, ": input ", shape_text(summary.input_shape), ", output ",
                                  shape_text(summary.output_shape), "\n\n", aligned(lines), "\n");
  text += base::concat("parameters:    ", grouped(summary.num_parameters), " (",
                       grouped(summary.num_trainable_parameters), " trainable), ",
                       scaled_text(summary.parameter_bytes, "B"), "\n");
  text += base::concat("buffers:       ", grouped(summary.num_buffers), ", ",
                       scaled_text(summary.buffer_bytes, "B"), "\n");
  if (!summary.observed) {
    return text +
           "This model does not report its layers, so shapes and FLOPs are unknown. Try: call them through "
           "cohort::models::observed(layer, input).\n";
  }
  text += base::concat("layer outputs: ", scaled_text(summary.activation_bytes, "B"), "\n");
  text += base::concat("forward:       ", scaled_text(summary.flops, "FLOPs"),
                       " (a multiply-add is 2), of which convolutions and linear layers ",
                       scaled_text(summary.multiply_adds, "MACs"), "\n");
  return text;
}

}  // namespace cohort::models
