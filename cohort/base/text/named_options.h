#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace cohort::base {

/// Options of a thing that is made by name, as a configuration writes them: names with texts. It remembers
/// which of them its reader asked for, so that whoever hands it out can reject the others, which are typing
/// errors.
///
///     const std::int64_t width = options.integer("width", 8, 1);
///     const std::string& root = options.at("root");   // must be there
///
/// Reading works as with a std::map too; who walks over all of them has asked for all. Copies share what was
/// asked for. Threads: any number may read at once.
class NamedOptions {
 public:
  /// Values as they are written, by name.
  using Map = std::map<std::string, std::string>;

  NamedOptions() : NamedOptions(Map()) {}
  NamedOptions(Map values);  // NOLINT(google-explicit-constructor): a configuration has them as a map
  NamedOptions(std::initializer_list<Map::value_type> values) : NamedOptions(Map(values)) {}

  /// Whether there is an option of this name, which counts as asked for.
  bool has(const std::string& name) const { return find(name) != end(); }
  /// Throws: ConfigError if there is none of this name.
  const std::string& at(const std::string& name) const;
  /// Returns the option as it is written, or `fallback` where there is none.
  std::string text(const std::string& name, std::string_view fallback) const;
  /// Throws: ConfigError naming option and text for what is no whole number from `least` to `most`.
  std::int64_t integer(const std::string& name, std::int64_t fallback,
                       std::int64_t least = std::numeric_limits<std::int64_t>::min(),
                       std::int64_t most = std::numeric_limits<std::int64_t>::max()) const;
  /// Throws: ConfigError naming option and text for what is no finite number.
  double number(const std::string& name, double fallback) const;
  /// Takes true, yes, on and 1; false, no, off and 0. Throws: ConfigError for another text.
  bool flag(const std::string& name, bool fallback) const;

  /// What a std::map has, for code that reads options as one. find(), count() and contains() ask for that
  /// option; begin() asks for all.
  Map::const_iterator find(const std::string& name) const;
  std::size_t count(const std::string& name) const { return has(name) ? 1 : 0; }
  bool contains(const std::string& name) const { return has(name); }
  Map::const_iterator begin() const;
  Map::const_iterator end() const { return values_.end(); }
  std::string& operator[](const std::string& name);
  bool empty() const { return values_.empty(); }
  std::size_t size() const { return values_.size(); }
  void clear() { values_.clear(); }
  bool operator==(const NamedOptions& other) const { return values_ == other.values_; }

  /// Returns the same options, of which nothing was asked for yet. `where` and `owner` ("data set 'depth'")
  /// stand in the messages.
  NamedOptions handed_to(std::string where, std::string owner) const;
  /// Throws: ConfigError naming the first option that was not asked for, with the nearest name that was,
  /// unless it is one of `ignored`.
  void reject_unread(std::initializer_list<std::string_view> ignored = {}) const;

 private:
  struct Asked;
  [[noreturn]] void fail(const std::string& name, std::string_view expected) const;

  Map values_;
  std::shared_ptr<Asked> asked_;
  std::string where_ = "base.options";
  std::string owner_ = "it";
};

}  // namespace cohort::base
