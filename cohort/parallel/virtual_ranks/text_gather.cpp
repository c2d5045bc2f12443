#include "cohort/parallel/virtual_ranks/text_gather.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::parallel {

TextGather::TextGather(SliceExchange* exchange, std::string text)
    : exchange_(exchange != nullptr && exchange->size() > 1 ? exchange : nullptr), text_(std::move(text)) {
  if (exchange_ == nullptr) return;
  length_ = at::full({1}, static_cast<std::int64_t>(text_.size()), at::kLong);
  lengths_ = at::empty({exchange_->size()}, at::kLong);
  arrived_ = exchange_->all_gather(lengths_.view(at::kByte), length_.view(at::kByte));
}

void TextGather::send_text() {
  if (exchange_ == nullptr) return;
  std::exchange(arrived_, nullptr)();
  const auto* const lengths = lengths_.const_data_ptr<std::int64_t>();
  // Pieces of an all-gather are of one size.
  const std::int64_t longest = *std::max_element(lengths, lengths + exchange_->size());
  if (longest == 0) return;
  padded_ = at::empty({longest}, at::kByte);
  std::memcpy(padded_.mutable_data_ptr(), text_.data(), text_.size());
  std::memset(padded_.mutable_data_ptr<std::uint8_t>() + text_.size(), 0,
              static_cast<std::size_t>(longest) - text_.size());
  all_ = at::empty({exchange_->size() * longest}, at::kByte);
  arrived_ = exchange_->all_gather(all_, padded_);
}

std::vector<std::string> TextGather::receive() {
  if (exchange_ == nullptr) return {text_};
  if (arrived_) std::exchange(arrived_, nullptr)();
  std::vector<std::string> texts;
  for (std::int64_t process = 0; process < exchange_->size(); ++process) {
    const auto length = static_cast<std::size_t>(lengths_.const_data_ptr<std::int64_t>()[process]);
    if (length == 0) {
      texts.emplace_back();
      continue;
    }
    const auto* const bytes = reinterpret_cast<const char*>(all_.const_data_ptr<std::uint8_t>());
    texts.emplace_back(bytes + process * padded_.numel(), length);
  }
  return texts;
}

std::vector<std::string> all_gather_texts(SliceExchange* exchange, const std::string& text) {
  TextGather gather(exchange, text);
  gather.send_text();
  return gather.receive();
}

}  // namespace cohort::parallel
