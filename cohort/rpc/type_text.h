#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeindex>
#include <vector>

/// Types in words that do not depend on the compiler, so that two programs can compare the signatures of
/// their functions: "vector<Tensor>", "{boxes: Tensor, name: string}".
namespace cohort::rpc {

class TypeText;
template <typename T>
void describe(TypeText& text);

/// Such a text while it is written, type after type.
class TypeText {
 public:
  /// Appends `words` as they are.
  void add(std::string_view words) { text_ += words; }

  /// "int64", "uint8", "float32", "bool".
  template <typename T>
  void add_number() {
    if constexpr (std::is_same_v<T, bool>) {
      add("bool");
    } else {
      add(std::is_floating_point_v<T> ? "float" : std::is_signed_v<T> ? "int" : "uint");
      add(std::to_string(8 * sizeof(T)));
    }
  }

  /// "map<string, Tensor>".
  template <typename... Members>
  void add_template(std::string_view name) {
    add(name);
    add("<");
    add_list<Members...>();
    add(">");
  }

  /// "int64, Tensor".
  template <typename... Members>
  void add_list() {
    bool is_first = true;
    ((add(is_first ? "" : ", "), is_first = false, describe<Members>(*this)), ...);
  }

  /// "{a: Tensor, b: int64}". In a struct that holds itself it is "struct 1" the second time: the number of
  /// structs around it up to itself.
  template <typename T, typename Members>
  void add_struct(const Members& members) {
    for (std::size_t up = 1; up <= open_.size(); ++up) {
      if (open_[open_.size() - up].type == typeid(T)) return add("struct " + std::to_string(up));
    }
    open_.push_back({typeid(T), true});
    add("{");
    members(*this);
    add("}");
    open_.pop_back();
  }
  /// Begins a member within add_struct(); its type is to be appended next.
  void add_member(std::string_view name) {
    if (!open_.back().is_empty) add(", ");
    open_.back().is_empty = false;
    add(name);
    add(": ");
  }

  /// What was written.
  const std::string& str() const { return text_; }

 private:
  struct Struct {
    std::type_index type;
    bool is_empty;
  };

  std::string text_;
  std::vector<Struct> open_;
};

}  // namespace cohort::rpc
