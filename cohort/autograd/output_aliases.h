#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cohort::autograd {

/// Whether view_like() makes a tensor with the layout of `like`, in the memory of `base`, of that.
bool can_be_viewed(const at::Tensor& base, const at::Tensor& like);

/// Returns the view of `base` that lies where `like` lies and reads its elements as that does: by
/// as_strided(), and where need be conj(), _neg_view(), view_as_real() or view_as_complex().
at::Tensor view_like(const at::Tensor& base, const at::Tensor& like);

/// Whether `tensor` is `base`, or a view of it that view_like() makes too.
bool is_remade_view(const at::Tensor& tensor, const at::Tensor& base);

/// Whether `tensor` is `base`, or such a view of it, and may be written to: it comes from operators that
/// return one tensor.
bool is_writable_view(const at::Tensor& tensor, const at::Tensor& base);

/// The results of a function that see each other's changes: the same tensor twice, or views of one tensor
/// that have a part in common. If each had a history of its own they would not: who writes to one of them
/// would change the values of the other, and not its gradient. So one is given a history, and the others are
/// made of it.
///
///     OutputAliases views;
///     views.detach(results);          // in the function's graph
///     ... cut `results` off, give each a history ...
///     views.restore(results);
///
/// Threads: one at a time; restore() any.
class OutputAliases {
 public:
  /// Cuts off from their graph those that are made of others, and adds what they are made of where that is no
  /// result itself. Views of one of `kept_bases` stay as they are.
  void detach(std::vector<at::Tensor>& results, const std::vector<at::Tensor>& kept_bases = {});
  /// Whether two results share memory in a way that is not one of these, and both have a graph: given
  /// histories one by one, who writes to one of them would not change the other's gradient. After detach().
  bool misses_one_of(const std::vector<at::Tensor>& results) const;
  /// Makes them anew, in the caller's gradient mode, and takes off what was added.
  void restore(std::vector<at::Tensor>& results) const;

 private:
  struct View {
    std::size_t result, base;
    bool is_same;
    at::ScalarType dtype;
    bool is_conj, is_neg;
    std::vector<std::int64_t> sizes, strides;
    std::int64_t bytes;  // from the base's first one
  };
  // Cuts off the results `alike`, which are made of `base`.
  void cut_off(std::vector<at::Tensor>& results, const std::vector<std::size_t>& alike,
               const at::Tensor& base);

  std::vector<View> views_;
  std::size_t num_results_ = 0, num_with_bases_ = 0;
};

}  // namespace cohort::autograd
