#include "cohort/base/text/bounded_json.h"

namespace cohort::base {
namespace {

using nlohmann::json;

/// Follows the events of the JSON parser, which does not recurse, and stops it at the limit.
class DepthCheck final : public nlohmann::json_sax<json> {
 public:
  explicit DepthCheck(int max_depth) : max_depth_(max_depth) {}
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t) override { return true; }
  bool number_unsigned(uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(json::binary_t&) override { return true; }
  bool key(std::string&) override { return true; }
  bool start_object(std::size_t) override { return ++depth_ <= max_depth_; }
  bool end_object() override { return --depth_ >= 0; }
  bool start_array(std::size_t) override { return ++depth_ <= max_depth_; }
  bool end_array() override { return --depth_ >= 0; }
  bool parse_error(std::size_t, const std::string&, const json::exception&) override { return false; }

 private:
  const int max_depth_;
  int depth_ = 0;
};

}  // namespace

bool is_bounded_json(std::string_view text, JsonLimits limits) {
  DepthCheck check(limits.depth);
  // Size first: it is known without reading the text.
  return text.size() <= limits.bytes && json::sax_parse(text.begin(), text.end(), &check);
}

std::optional<json> parse_bounded_json(std::string_view text, JsonLimits limits) {
  if (!is_bounded_json(text, limits)) {
    return std::nullopt;
  }
  // The document of a second pass is walked recursively, by dump() for one, so its depth had to be bounded
  // before.
  return json::parse(text.begin(), text.end());
}

}  // namespace cohort::base
