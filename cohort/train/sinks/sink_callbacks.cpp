// Files are opened when a start counts, not before: a start that is rejected leaves those of an earlier run
// alone. Rows after the checkpoint are cut off then. Images of the first batch wait in memory until that
// moment.
#include "cohort/train/sinks/sink_callbacks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>

#include "cohort/data/codecs/codec.h"
#include "cohort/data/loader.h"
#include "cohort/memory/process_memory.h"
#include "cohort/train/sinks/curves.h"

namespace cohort::train {
namespace {

std::optional<double> find(const std::map<std::string, double>& values, const std::string& name) {
  const auto found = values.find(name);
  return found == values.end() ? std::nullopt : std::optional(found->second);
}

MetricValues in_order(const std::map<std::string, double>& metrics) {
  return MetricValues(metrics.begin(), metrics.end());
}

/// "train_loss" becomes "train/loss": TensorBoard groups by what stands before the slash.
std::string tag_of(std::string metric) {
  // Only the first underscore: "val_top_5" is "val/top_5".
  if (metric.starts_with("train_") || metric.starts_with("val_")) metric[metric.find('_')] = '/';
  return metric;
}

/// Turns one normalised [C, H, W] tensor back into pixels.
data::Image to_image(at::Tensor image, const std::vector<double>& mean, const std::vector<double>& std) {
  image = image.detach().to(at::kCPU, at::kFloat);
  if (!mean.empty()) {
    const auto shape = std::vector<std::int64_t>{-1, 1, 1};
    // The inverse of Normalize, so that the image shows colours as in the file.
    image = image * at::tensor(std, at::kFloat).view(shape) + at::tensor(mean, at::kFloat).view(shape);
  }
  const at::Tensor pixels =
      image.mul(255).round().clamp(0, 255).to(at::kByte).permute({1, 2, 0}).contiguous();  // CHW to HWC
  data::Image result;
  result.height = pixels.size(0);
  result.width = pixels.size(1);
  result.channels = pixels.size(2);
  result.pixels.assign(pixels.data_ptr<std::uint8_t>(), pixels.data_ptr<std::uint8_t>() + pixels.numel());
  return result;
}

}  // namespace

ProgressCallback::ProgressCallback(ProgressOptions options) : progress_(options) {}

void ProgressCallback::on_step_end(const StepReport& report) {
  // Averages over ranks are made at logged steps only; in between the bar shows the last ones.
  if (report.logged) last_averages_ = report.averages;
  ProgressNumbers numbers;
  numbers.epoch = report.epoch;
  numbers.epochs = report.epochs;
  numbers.step = report.step_in_epoch;
  numbers.steps = report.steps_per_epoch;
  numbers.loss = find(last_averages_, "loss");
  numbers.accuracy = find(last_averages_, "accuracy");
  numbers.lr = report.lr;
  numbers.samples_per_second = report.samples_per_second;
  numbers.data_wait = report.data_wait_share;
  numbers.seconds_left = report.seconds_left;
  // Reads a file of /proc, which is too slow for each step.
  if (report.logged) memory_bytes_ = memory::resident_bytes();
  if (memory_bytes_ > 0) numbers.memory_bytes = memory_bytes_;
  progress_.update(numbers);
}

void ProgressCallback::on_epoch_end(const EpochReport& report) {
  char text[256];
  std::snprintf(text, sizeof text, "epoch %lld/%lld:", static_cast<long long>(report.epoch),
                static_cast<long long>(report.epochs));
  std::string line = text;
  for (const auto& [name, value] : report.metrics) {
    if (name.ends_with("accuracy")) {
      std::snprintf(text, sizeof text, "  %s %.2f %%", name.c_str(), 100 * value);
    } else {
      std::snprintf(text, sizeof text, "  %s %.4f", name.c_str(), value);
    }
    line += text;
  }
  std::snprintf(text, sizeof text, "  lr %.4g  %.0f samples/s  %.1f s  data wait %.1f %%%s", report.lr,
                report.samples_per_second, report.seconds, 100 * report.data_wait_share,
                report.best ? "  (best)" : "");
  progress_.print(line + text);
  // They are of an epoch that is over.
  last_averages_.clear();
}

void ProgressCallback::on_fit_end(const FitResult&) {
  progress_.clear();
}

MetricsCallback::MetricsCallback(std::filesystem::path folder, std::string title)
    : folder_(std::move(folder)), title_(std::move(title)) {}

void MetricsCallback::on_start_counts(const FitInfo& info) {
  log_.emplace(folder_);
  // Rows of steps that will be made again: of a run that was killed after its last checkpoint.
  log_->truncate_after(info.first_step, info.first_epoch);
}

void MetricsCallback::on_step_end(const StepReport& report) {
  if (!report.logged) return;
  MetricValues values = in_order(report.averages);
  values.emplace_back("lr", report.lr);
  values.emplace_back("samples_per_second", report.samples_per_second);
  values.emplace_back("data_wait", report.data_wait_share);
  log_->write_step(report.step, report.epoch, values);
}

void MetricsCallback::on_epoch_end(const EpochReport& report) {
  MetricValues values = in_order(report.metrics);
  values.emplace_back("lr", report.lr);
  values.emplace_back("samples_per_second", report.samples_per_second);
  values.emplace_back("data_wait", report.data_wait_share);
  values.emplace_back("seconds", report.seconds);
  log_->write_epoch(report.step, report.epoch, values);
}

void MetricsCallback::on_fit_end(const FitResult&) {
  if (!log_ || log_->epochs().empty()) return;
  write_curves(folder_ / "curves.svg", curves_from_epochs(log_->epochs(), title_));
}

TensorBoardCallback::TensorBoardCallback(std::filesystem::path folder, int images, std::vector<double> mean,
                                         std::vector<double> std)
    : folder_(std::move(folder)), images_(images), mean_(std::move(mean)), std_(std::move(std)) {}

void TensorBoardCallback::on_start_counts(const FitInfo& info) {
  writer_.emplace(folder_, info.resumed ? std::optional(info.first_step) : std::nullopt);
  // TensorBoard has them from the first start; they have step 0, which a resumed session would not drop.
  if (!info.resumed) {
    for (std::size_t i = 0; i < first_images_.size(); ++i) {
      const data::Image& image = first_images_[i];
      const std::vector<std::byte> png = data::encode_png(image);
      writer_->image_png("input/" + std::to_string(i), png, image.height, image.width, image.channels, 0);
    }
  }
  first_images_.clear();
}

void TensorBoardCallback::on_first_batch(data::Batch& batch) {
  const at::Tensor input = batch.input();
  // Only tensors of one or three channels can be shown as images.
  if (input.dim() != 4 || (input.size(1) != 1 && input.size(1) != 3)) return;
  for (std::int64_t i = 0; i < std::min<std::int64_t>(images_, batch.size); ++i) {
    first_images_.push_back(to_image(input[i], mean_, std_));
  }
}

void TensorBoardCallback::on_step_end(const StepReport& report) {
  if (!report.logged) return;
  for (const auto& [name, value] : report.averages) writer_->scalar("step/" + name, value, report.step);
  writer_->scalar("lr", report.lr, report.step);
  writer_->scalar("speed/samples_per_second", report.samples_per_second, report.step);
  writer_->scalar("speed/data_wait", report.data_wait_share, report.step);
  writer_->flush();  // who watches the run sees what metrics.jsonl has
}

void TensorBoardCallback::on_epoch_end(const EpochReport& report) {
  for (const auto& [name, value] : report.metrics) writer_->scalar(tag_of(name), value, report.step);
  writer_->flush();
}

void TensorBoardCallback::on_save(std::int64_t) {
  writer_->flush();
}

void TensorBoardCallback::on_fit_end(const FitResult&) {
  if (writer_) writer_->flush();
}

}  // namespace cohort::train
