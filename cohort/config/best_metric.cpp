// The name of a metric is cut into words. The last word decides; the words before it may only veto. A name
// that says nothing, or says both, gives no answer; then the user has to set run.best_mode.
#include "cohort/config/best_metric.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>
#include <vector>

namespace cohort::config {
namespace {

using namespace std::string_view_literals;

// Whole words only: "ap" inside "mape" must not count. Endings are compared for the few words that names join
// on, as in "crossentropyloss".
constexpr std::array kLess = {"loss"sv, "error"sv, "err"sv,        "mse"sv, "rmse"sv, "mae"sv,
                              "mape"sv, "nll"sv,   "perplexity"sv, "ppl"sv, "wer"sv,  "cer"sv,
                              "fid"sv,  "cost"sv,  "distance"sv,   "bpc"sv, "bpd"sv};
constexpr std::array kMore = {"accuracy"sv, "acc"sv,   "top1"sv,  "top5"sv, "f1"sv,  "precision"sv,
                              "recall"sv,   "auc"sv,   "ap"sv,    "map"sv,  "iou"sv, "miou"sv,
                              "dice"sv,     "bleu"sv,  "psnr"sv,  "ssim"sv, "r2"sv,  "kappa"sv,
                              "mcc"sv,      "auroc"sv, "reward"sv};

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

bool says_less(const std::string& word) {
  return word.ends_with("loss") || word.ends_with("error") || contains(kLess, word);
}

bool says_more(const std::string& word) {
  // "Accuracy" is the one such word that names join on, as in "balancedaccuracy".
  return word.ends_with("accuracy") || contains(kMore, word);
}

}  // namespace

std::optional<bool> more_is_better(const std::string& metric) {
  std::vector<std::string> words = words_of(metric);
  // neg_mean_squared_error: more of it is better, and of other such names who knows.
  if (contains(words, "neg") || contains(words, "negative")) return std::nullopt;
  // A score is more of what is good (f1_score), and who knows what of (fid_score, brier_score).
  const bool is_score = words.size() > 1 && words.back() == "score";
  if (is_score) words.pop_back();
  // "error_accuracy" could mean either. A wrong guess would keep the worst checkpoint as best.
  if (says_more(words.back())) {
    return std::ranges::any_of(words, says_less) ? std::nullopt : std::optional(true);
  }
  return says_less(words.back()) && !is_score ? std::optional(false) : std::nullopt;
}

}  // namespace cohort::config
