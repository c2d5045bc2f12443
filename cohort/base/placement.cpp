// A text is taken apart from its end: the tag after a slash, then the numbers after a colon, then the kind.
// A number means one of the cores that this process may use, and becomes a core of the machine. Always: the
// name is canonical, so cpu:3,2 and cpu:2-3 are one place. A tag makes two places of the same cores.
// Surprising: in a list, a comma before a digit continues the cores, and every other comma begins a new
// place.
#include "cohort/base/placement.h"

#include <cctype>
#include <charconv>
#include <optional>

#include "cohort/base/error.h"

namespace cohort::base {
namespace {

constexpr std::string_view kNotation = "cpu, cpu:0, cpu:2-3, cpu:0/a (a second place on a core) or cuda:3";

[[noreturn]] void reject_placement(std::string_view text, std::string_view why,
                                   std::string_view hint = kNotation) {
  throw ConfigError("base.placement", concat("placement \"", text, "\": ", why), hint);
}

bool is_tag(std::string_view tag) {
  if (tag.empty()) return false;
  for (const char c : tag) {
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_' && c != '-') return false;
  }
  return true;
}

CpuSet cores_of(std::string_view text, const CpuSet& wanted, const CpuSet& allowed) {
  std::vector<int> ids;
  for (const int index : wanted.ids()) {
    if (index >= allowed.size()) {
      // The message counts as the user does: from 0, in the cores of this process.
      const std::string range = allowed.size() == 1 ? "cpu:0" : concat("cpu:0 to cpu:", allowed.size() - 1);
      reject_placement(
          text,
          concat("core ", index, " is asked for, but this process may use ", allowed.size(),
                 allowed.size() == 1 ? " core" : " cores", " (the machine's ", allowed.to_string(), ")"),
          concat(range, ", or start the process with more cores"));
    }
    ids.push_back(allowed.ids()[static_cast<std::size_t>(index)]);
  }
  return CpuSet(std::move(ids));
}

int gpu_index(std::string_view text, std::string_view number) {
  int index = -1;
  const auto result = std::from_chars(number.data(), number.data() + number.size(), index);
  // LibTorch counts devices in a signed byte.
  if (result.ec != std::errc() || result.ptr != number.data() + number.size() || index < 0 || index > 127) {
    reject_placement(text, concat("got \"", number, "\", expected the number of a GPU"));
  }
  return index;
}

}  // namespace

Placement Placement::parse(std::string_view text, const CpuSet& allowed) {
  std::string_view rest = text;
  Placement placement;
  std::string tag;
  if (const std::size_t slash = rest.find('/'); slash != std::string_view::npos) {
    const std::string_view after = rest.substr(slash + 1);
    if (!is_tag(after)) {
      reject_placement(text, concat("got \"", after, "\" after the slash, expected letters, digits, _ or -"));
    }
    tag = concat("/", after);
    rest = rest.substr(0, slash);
  }
  const std::size_t colon = rest.find(':');
  const std::string_view kind = rest.substr(0, colon);
  const std::optional<std::string_view> number =
      colon == std::string_view::npos ? std::nullopt : std::optional(rest.substr(colon + 1));
  if (kind == "cpu") {
    placement.cpus = allowed;
    placement.name = "cpu";
    if (number) {
      CpuSet wanted;
      try {
        wanted = CpuSet::parse(*number);
      } catch (const ConfigError&) {
        reject_placement(text, concat("got \"", *number, "\" after the colon, expected core numbers"));
      }
      placement.cpus = cores_of(text, wanted, allowed);
      placement.name = concat("cpu:", wanted.to_string());
    }
  } else if (kind == "cuda") {
    placement.device = concat("cuda:", number ? gpu_index(text, *number) : 0);
    placement.cpus = allowed;
    placement.name = placement.device;
  } else {
    reject_placement(text,
                     kind.empty() ? "is empty" : concat("got device \"", kind, "\", expected cpu or cuda"));
  }
  placement.name += tag;
  return placement;
}

std::vector<Placement> parse_placements(std::string_view text, const CpuSet& allowed) {
  std::vector<Placement> placements;
  const auto separates = [&](std::size_t i) {
    if (std::isspace(static_cast<unsigned char>(text[i]))) return true;
    return text[i] == ',' && (i + 1 >= text.size() || !std::isdigit(static_cast<unsigned char>(text[i + 1])));
  };
  for (std::size_t i = 0; i < text.size();) {
    std::size_t end = i;
    while (end < text.size() && !separates(end)) ++end;
    if (end > i) placements.push_back(Placement::parse(text.substr(i, end - i), allowed));
    i = end + 1;
  }
  if (placements.empty()) reject_placement(text, "names no place");
  return placements;
}

}  // namespace cohort::base
