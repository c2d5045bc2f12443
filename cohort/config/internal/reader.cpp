// A key is looked up in the table, its value is assigned by the type of its member, and checked at once. In a
// file a key may be set once, under its own name or a flat name; of overrides the last counts. Two flat names
// of the same key must agree also there. An unknown name is an error with the nearest known name. An override
// of a text key is taken as it is, unless it is quoted. To YAML a path with " #" or ": " in it would be
// something else.
#include "cohort/config/internal/reader.h"

#include <algorithm>
#include <cctype>
#include <set>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/text/nearest_name.h"
#include "cohort/config/internal/flat_keys.h"
#include "cohort/config/renamed_keys.h"

namespace cohort::config {
namespace {

using base::concat;

[[noreturn]] void fail_at(const std::string& where, const std::string& what, const std::string& hint = "") {
  throw ConfigError("config.load", concat(where, ": ", what), hint);
}

// What to try in place of an unknown key of a section.
std::string suggestion(std::string_view section, std::string_view name) {
  std::vector<std::string> names;
  for (const ConfigKey& key : config_keys()) {
    // The right name in the wrong section is a surer guess than a similar name in the right one.
    if (key.short_name() == name) return concat("the nearest one, ", key.name);  // right name, wrong section
    if (key.section() == section) names.emplace_back(key.short_name());
  }
  if (const auto near = base::nearest_name(name, names))
    return concat("the nearest one, ", section, ".", *near);
  return concat("one of the keys of ", section, ": ", base::join(names));
}

// `value` is what the user gave for it; empty: more than one line.
[[noreturn]] void fail_unknown_key(const std::string& where, const std::string& key,
                                   const std::string& value) {
  const std::string renamed = renamed_to(key, value);
  if (!renamed.empty()) fail_at(where, concat("the key '", key, "' was renamed"), renamed);
  const std::size_t dot = key.find('.');
  fail_at(where, concat("unknown key '", key, "'"), suggestion(key.substr(0, dot), key.substr(dot + 1)));
}

// Digits and underscores have no case, so "no small letter" is the test.
bool is_flat_style(std::string_view name) {
  return !name.empty() &&
         std::none_of(name.begin(), name.end(), [](unsigned char c) { return std::islower(c) != 0; });
}

[[noreturn]] void fail_unknown_top(const std::string& name, const std::string& where) {
  for (const ConfigKey& key : config_keys()) {
    // "lr: 0.1" at the top level: the section is missing, or the indentation.
    if (key.short_name() == name) {
      fail_at(where, concat("unknown key '", name, "'"),
              concat("the nearest one, ", key.name, " (inside '", key.section(), ":')"));
    }
  }
  std::vector<std::string> flat;
  for (const FlatKey& key : flat_keys()) flat.emplace_back(key.name);
  const auto near = base::nearest_name(name, flat);  // in any case
  if (is_flat_style(name) || (near && base::edit_distance(name, *near) == 0)) {
    fail_at(where, concat("unknown key '", name, "'"),
            near ? concat("the nearest one, ", *near) : concat("one of the flat keys ", base::join(flat)));
  }
  fail_at(where,
          concat("unknown section '", name,
                 "': expected one of model, data, optim, schedule, train, distributed, comm, run"),
          concat("the nearest one, ", base::least_changed_name(name, config_sections())));
}

std::string key_name(const YAML::Node& node, const YamlSource& source) {
  if (!node.IsScalar())
    fail_at(source.at(node.Mark()), concat("got ", describe(node), " as a key, expected a name"));
  return node.Scalar();
}

/// Reads a list of T; one value alone counts as a list of one.
template <typename T, typename Read>
bool read_list(const YAML::Node& node, const Read& read, std::vector<T>& out) {
  // `out` changes only when the whole list is good, so that a caller may try another type.
  std::vector<T> values;
  const auto add = [&](const YAML::Node& item) {
    const auto value = read(item);
    if (value) values.push_back(*value);
    return value.has_value();
  };
  if (node.IsSequence()) {
    for (const YAML::Node& item : node) {
      if (!add(item)) return false;
    }
  } else if (!add(node)) {
    return false;
  }
  out = std::move(values);
  return true;
}

std::vector<double> read_argument(const std::string& shown, const YAML::Node& node,
                                  const YamlSource& source) {
  std::vector<double> values;
  const auto number = [](const YAML::Node& item) -> std::optional<double> {
    // Arguments of transforms are numbers throughout; a switch among them is 0 or 1.
    if (const auto flag = as_bool(item)) return *flag ? 1.0 : 0.0;
    return as_double(item);
  };
  if (!read_list(node, number, values)) {
    fail_at(source.at(node.Mark()),
            concat(shown, ": got ", describe(node), ", expected a number, true, false or a list of numbers"));
  }
  return values;
}

TransformConfig read_transform(const std::string& shown, const YAML::Node& node, const YamlSource& source) {
  TransformConfig transform;
  if (node.IsScalar()) {
    transform.name = as_text(node).value_or("");
  } else if (node.IsMap() && node.size() == 1) {
    // Two entries would be two transforms at one place of the list, whose order is not given.
    transform.name = key_name(node.begin()->first, source);
    const YAML::Node arguments = node.begin()->second;
    const std::string inner = concat(shown, ": ", transform.name);
    if (arguments.IsMap()) {
      for (const auto& item : arguments) {
        const std::string name = key_name(item.first, source);
        if (!transform.args.emplace(name, read_argument(concat(inner, ".", name), item.second, source))
                 .second) {
          fail_at(source.at(item.first.Mark()), concat(inner, ": '", name, "' stands twice"));
        }
      }
    } else if (!arguments.IsNull()) {
      // The empty name is the argument without a name; the transform itself says which of its arguments that
      // is.
      transform.args[""] = read_argument(inner, arguments, source);
    }
  }
  if (transform.name.empty()) {
    fail_at(source.at(node.Mark()),
            concat(shown, ": got ", describe(node),
                   ", expected a transform such as RandomHorizontalFlip or Resize: 64"));
  }
  return transform;
}

std::map<std::string, std::string> read_map(const std::string& shown, const YAML::Node& node,
                                            const YamlSource& source) {
  std::map<std::string, std::string> map;
  for (const auto& item : node) {
    const std::string name = key_name(item.first, source);
    const std::optional<std::string> value = as_text(item.second);
    if (!value) {
      fail_at(source.at(item.second.Mark()),
              concat(shown, ".", name, ": got ", describe(item.second), ", expected one value"));
    }
    if (!map.emplace(name, *value).second) {
      fail_at(source.at(item.first.Mark()), concat(shown, ": '", name, "' stands twice"));
    }
  }
  return map;
}

/// Puts `node` into the member; false when it is of another type.
struct Assign {
  const std::string& shown;
  const YAML::Node& node;
  const YamlSource& source;

  template <typename T>
  static bool put(const std::optional<T>& value, T* out) {
    if (value) *out = *value;
    return value.has_value();
  }
  bool operator()(bool* out) const { return put(as_bool(node), out); }
  bool operator()(int64_t* out) const { return put(as_int(node), out); }
  bool operator()(double* out) const { return put(as_double(node), out); }
  bool operator()(std::string* out) const { return put(as_text(node), out); }
  bool operator()(std::vector<int64_t>* out) const { return read_list(node, as_int, *out); }
  bool operator()(std::vector<double>* out) const { return read_list(node, as_double, *out); }
  bool operator()(TransformList* out) const {
    const std::optional<std::string> preset = node.IsScalar() ? as_text(node) : std::nullopt;
    if (preset && !preset->empty()) {
      *out = {.preset = *preset, .list = {}};
      return true;
    }
    if (!node.IsSequence()) return false;
    TransformList result{.preset = "", .list = {}};
    for (const YAML::Node& item : node) result.list.push_back(read_transform(shown, item, source));
    *out = std::move(result);
    return true;
  }
  bool operator()(std::map<std::string, std::string>* out) const {
    if (!node.IsMap()) return false;
    *out = read_map(shown, node, source);
    return true;
  }
};

}  // namespace

void ConfigReader::read_document(const YAML::Node& document, const YamlSource& source) {
  if (document.IsNull()) return;
  if (!document.IsMap()) {
    fail_at(source.at(document.Mark()),
            concat("got ", describe(document), ", expected sections (model:, data:, optim:, ...)"));
  }
  bool flat = false;
  for (const auto& item : document) {
    flat = flat || (item.first.IsScalar() && find_flat_key(item.first.Scalar()) != nullptr);
  }
  // Before the first key is read, wherever the flat key stands in the file: a key must win over a default.
  if (flat) set_flat_defaults(config_);

  const auto sections = config_sections();
  std::set<std::string> seen;
  for (const auto& item : document) {
    const std::string name = key_name(item.first, source);
    const YAML::Mark mark = item.first.Mark();
    // yaml-cpp keeps both of two equal keys and says nothing.
    if (!seen.insert(name).second) fail_at(source.at(mark), concat("'", name, "' stands twice"));
    if (find_flat_key(name) != nullptr) {
      read_flat(name, item.second, source, mark);
    } else if (std::find(sections.begin(), sections.end(), name) != sections.end()) {
      read_section(name, item.second, source);
    } else {
      fail_unknown_top(name, source.at(mark));
    }
  }
}

void ConfigReader::read_section(const std::string& section, const YAML::Node& node,
                                const YamlSource& source) {
  if (node.IsNull()) return;
  if (!node.IsMap()) {
    fail_at(source.at(node.Mark()), concat(section, ": got ", describe(node), ", expected keys with values"));
  }
  for (const auto& item : node) {
    const std::string name = key_name(item.first, source);
    const std::string whole = concat(section, ".", name);
    const ConfigKey* key = find_key(whole);
    if (key == nullptr) {
      fail_unknown_key(source.at(item.first.Mark()), whole, as_text(item.second).value_or(""));
    }
    read_key(*key, whole, item.second, source, item.first.Mark());
  }
}

void ConfigReader::read_flat(const std::string& name, const YAML::Node& node, const YamlSource& source,
                             const YAML::Mark& mark) {
  const FlatKey* flat = find_flat_key(name);
  if (flat->key[0] == '\0') {
    read_num_gpus(node, source);
    return;
  }
  read_key(*find_key(flat->key), name, node, source, mark);
  // The published scripts write VGG16. Names of models are small here.
  if (name == "MODEL") {
    std::transform(config_.model.name.begin(), config_.model.name.end(), config_.model.name.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  }
}

void ConfigReader::read_num_gpus(const YAML::Node& node, const YamlSource& source) {
  const std::optional<int64_t> count = as_int(node);
  if (!count || *count < 0) {
    fail_at(source.at(node.Mark()),
            concat("NUM_GPUS: got ", describe(node), ", expected a whole number >= 0"));
  }
  config_.train.device = *count == 0 ? "cpu" : "auto";
  // Both keys count as set, so that the same file cannot also set them under their own names.
  if (!source.is_override) note_set(*find_key("train.device"), "NUM_GPUS", source, node.Mark());
  config_.distributed.nproc_per_node = std::max<int64_t>(1, *count);
  if (!source.is_override) {
    note_set(*find_key("distributed.nproc_per_node"), "NUM_GPUS", source, node.Mark());
  }
}

void ConfigReader::read_key(const ConfigKey& key, const std::string& shown, const YAML::Node& node,
                            const YamlSource& source, const YAML::Mark& mark) {
  if (!std::visit(Assign{shown, node, source}, key.target(config_))) {
    fail_at(source.at(node.IsNull() ? mark : node.Mark()),
            concat(shown, ": got ", describe(node), ", expected ", expectation(key)));
  }
  // The value is already in its member. That does no harm: an error ends the whole load.
  const std::string rejected = rejected_value(key, config_);
  if (!rejected.empty()) {
    std::string hint;
    const auto close = node.IsScalar() ? base::nearest_name(node.Scalar(), key.choices) : std::nullopt;
    if (close) hint = concat(shown, ": ", *close);
    const std::string renamed = node.IsScalar() ? renamed_to(key.name, node.Scalar()) : "";
    if (!renamed.empty()) hint = concat(renamed, " (it was renamed)");
    fail_at(source.at(node.Mark()), concat(shown, ": got ", rejected, ", expected ", expectation(key)), hint);
  }
  read_.insert(key.name);
  // Of overrides a later one wins, but two names of one thing must agree there too.
  if (!source.is_override) {
    note_set(key, shown, source, mark);
  } else if (find_flat_key(shown) != nullptr) {
    const SetBy now{shown, source.at(mark), value_text(key, config_)};
    const auto [before, is_new] = overridden_by_.emplace(key.name, now);
    if (!is_new && before->second.shown != shown && before->second.value != now.value)
      fail_two_names(key, before->second, now);
  }
}

void ConfigReader::fail_two_names(const ConfigKey& key, const SetBy& first, const SetBy& now) {
  fail_at(now.where,
          concat(now.shown, " is ", now.value, " but ", first.shown, " is ", first.value, " (", first.where,
                 "): both mean ", key.name),
          "one of them only");
}

void ConfigReader::note_set(const ConfigKey& key, const std::string& shown, const YamlSource& source,
                            const YAML::Mark& mark) {
  const SetBy now{shown, source.at(mark), value_text(key, config_)};
  const auto [before, is_new] = set_by_.emplace(key.name, now);
  if (is_new) return;
  const SetBy& first = before->second;
  // WD and WEIGHT_DECAY are the only flat names that share a key. The scripts have both, so equal values
  // pass.
  const bool both_names_of_decay =
      first.shown != shown && find_flat_key(first.shown) != nullptr && find_flat_key(shown) != nullptr;
  if (both_names_of_decay && first.value == now.value) return;
  if (both_names_of_decay) fail_two_names(key, first, now);
  fail_at(now.where, concat("'", shown, "' is set twice: first as ", first.shown, " (", first.where, ")"),
          "one of them only");
}

void ConfigReader::read_override(const std::string& text) {
  const YamlSource source{text, true};
  const std::string where = source.at({});
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    fail_at(where, "expected key=value", "optim.lr=0.1");
  }
  const std::string name = text.substr(0, equals);
  const std::string written = text.substr(equals + 1);
  const ConfigKey* const key = find_key(name);
  // A text is taken as it is: to YAML a path with " #" or ": " in it would be another thing. Quoted it is
  // YAML.
  const bool is_text = key != nullptr && std::holds_alternative<std::string*>(key->target(config_)) &&
                       !written.starts_with('"') && !written.starts_with('\'');
  const YAML::Node value = is_text && !written.empty() ? YAML::Node(written) : parse_yaml(written, source);
  if (key != nullptr) return read_key(*key, name, value, source, {});
  if (find_flat_key(name) != nullptr) return read_flat(name, value, source, {});
  // Entries of a map are no keys of the table, so each map is tried as a prefix.
  for (const char* map : {"model.options", "data.options", "data.sampler_options", "optim.options",
                          "schedule.options", "distributed.device_map"}) {
    const std::string prefix = concat(map, ".");
    if (!name.starts_with(prefix) || name.size() == prefix.size()) continue;
    const std::optional<std::string> option = as_text(value);
    if (!option) fail_at(where, concat("got ", describe(value), ", expected one value"));
    auto* target = std::get<std::map<std::string, std::string>*>(find_key(map)->target(config_));
    (*target)[name.substr(prefix.size())] = *option;
    return;
  }
  const std::size_t dot = name.find('.');
  const auto sections = config_sections();
  const std::string section = name.substr(0, dot);
  if (std::find(sections.begin(), sections.end(), section) == sections.end()) {
    fail_unknown_top(dot == std::string::npos ? name : section, where);
  }
  if (dot == std::string::npos)
    fail_at(where, concat("'", name, "' is a section"), concat(name, ".KEY=value"));
  fail_unknown_key(where, name, written);
}

}  // namespace cohort::config
