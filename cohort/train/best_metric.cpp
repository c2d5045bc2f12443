#include "cohort/train/best_metric.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>
#include <vector>

namespace cohort::train {
namespace {

using namespace std::string_view_literals;

constexpr std::array kLess = {"loss"sv, "error"sv, "err"sv,        "mse"sv, "rmse"sv, "mae"sv,
                              "mape"sv, "nll"sv,   "perplexity"sv, "ppl"sv, "wer"sv,  "cer"sv,
                              "fid"sv,  "cost"sv,  "distance"sv,   "bpc"sv, "bpd"sv};
constexpr std::array kMore = {"accuracy"sv, "acc"sv,  "top1"sv,  "top5"sv,  "f1"sv,  "precision"sv,
                              "recall"sv,   "auc"sv,  "ap"sv,    "map"sv,   "iou"sv, "miou"sv,
                              "dice"sv,     "bleu"sv, "psnr"sv,  "ssim"sv,  "r2"sv,  "score"sv,
                              "kappa"sv,    "mcc"sv,  "auroc"sv, "reward"sv};

std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words(1);
  for (const unsigned char c : name) {
    if (std::isalnum(c) == 0) {
      words.emplace_back();
    } else {
      words.back() += static_cast<char>(std::tolower(c));
    }
  }
  return words;
}

template <typename Names>
bool contains(const Names& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

}  // namespace

std::optional<bool> more_is_better(const std::string& metric) {
  const std::vector<std::string> words = words_of(metric);
  // neg_mean_squared_error: more of it is better, and of other such names who knows.
  if (contains(words, "neg") || contains(words, "negative")) return std::nullopt;
  const std::string& last = words.back();
  if (last.ends_with("loss") || last.ends_with("error") || contains(kLess, last)) return false;
  if (last.ends_with("accuracy") || contains(kMore, last)) return true;
  return std::nullopt;
}

}  // namespace cohort::train
