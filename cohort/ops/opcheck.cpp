// The operator runs on its arguments, and on copies that lie otherwise in memory: with gaps, transposed,
// expanded. Results must agree with those of dense copies, and nothing that the schema does not name may be
// written to. The meta function must give the same sizes, strides and type, and gradients pass gradcheck and
// the same layouts. Shapes without dimensions or elements are tried too, where the operator takes them.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>

#include "cohort/base/text/format_list.h"
#include "cohort/ops/check.h"
#include "cohort/ops/operator.h"

namespace cohort::ops {
namespace {

using Values = std::vector<c10::IValue>;
using Tensors = std::vector<at::Tensor>;
constexpr const char* kWhere = "ops.opcheck";
constexpr const char* kHint = "x.contiguous() at the kernel's beginning, or strides in its loops";

Tensors tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

/// A copy of the values in which each tensor is what `fn` makes of it.
template <typename Fn>
Values mapped(const Values& values, const Fn& fn) {
  Values result;
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      result.emplace_back(tensor.defined() ? fn(tensor) : tensor);
    } else if (value.isTensorList()) {
      Tensors list = value.toTensorVector();
      for (at::Tensor& tensor : list) tensor = fn(tensor);
      result.emplace_back(list);
    } else {
      result.push_back(value);
    }
  }
  return result;
}

Values copied(const Values& values) {
  return mapped(values, [](const at::Tensor& tensor) {
    // Each call gets copies: an operator under test may write where it should not.
    return tensor.detach().clone().set_requires_grad(tensor.requires_grad());
  });
}

// Another way for the elements of a tensor to lie in memory.
struct Form {
  const char* name;
  at::Tensor (*make)(const at::Tensor&);
  bool shares_elements;  // then it is none for what is written to
};

at::Tensor with_gaps(const at::Tensor& tensor) {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes.push_back(2);
  at::Tensor wide = at::empty(sizes, tensor.options());
  // Known numbers in the gaps, which nothing_beside() compares afterwards.
  wide.zero_();
  at::Tensor view = wide.select(-1, 0);
  view.copy_(tensor);
  return view;
}

at::Tensor transposed(const at::Tensor& tensor) {
  if (tensor.dim() < 2) return tensor.clone();
  // Transposed, copied, transposed back: equal values, with the first and the last stride exchanged.
  return tensor.transpose(0, -1).clone(at::MemoryFormat::Contiguous).transpose(0, -1);
}

// Its first part again and again; the rest lies after it, and is what a loop without strides finds.
at::Tensor expanded(const at::Tensor& tensor) {
  return tensor.dim() == 0 || tensor.numel() == 0 ? tensor : tensor.narrow(0, 0, 1).expand(tensor.sizes());
}

constexpr std::array kForms = {Form{"tensors with gaps between their elements", &with_gaps, false},
                               Form{"transposed tensors", &transposed, false},
                               Form{"expanded tensors", &expanded, true}};

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.detach().clone(at::MemoryFormat::Contiguous);
}

// Other shapes that an operator may take.
at::Tensor without_dimensions(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? tensor : tensor.reshape(-1)[0];
}
at::Tensor without_elements(const at::Tensor& tensor) {
  return tensor.dim() == 0 ? tensor : tensor.narrow(0, 0, 0);
}

std::string text_of(at::IntArrayRef numbers) {
  return "[" + base::join(numbers) + "]";
}

class OperatorCheck {
 public:
  OperatorCheck(const std::string& name, const Values& arguments, const OpcheckOptions& options)
      : op_(find_operator(name)), name_(name), arguments_(arguments), options_(options) {
    // Before defaults are added, so that the message has the user's number.
    const std::size_t given = arguments.size();
    torch::jit::Stack stack = arguments_;
    try {
      op_.schema().checkAndNormalizeInputs(stack);
    } catch (const c10::Error& error) {
      throw UsageError(kWhere, base::concat(given, " arguments do not fit ", op_.schema(), ": ",
                                            error.what_without_backtrace()));
    }
    arguments_ = stack;
  }

  void run() {
    check(/*with_gradients=*/true);
    const Values given = arguments_;
    // Indices say what shapes go together.
    if (has_indices(given)) return;
    const std::string name = name_;
    for (const auto& [shape, make] : {std::pair{" on tensors without dimensions", &without_dimensions},
                                      std::pair{" on tensors without elements", &without_elements}}) {
      arguments_ = mapped(given, [make = make](const at::Tensor& tensor) {
        return make(tensor.detach()).clone().set_requires_grad(tensor.requires_grad());
      });
      name_ = name + shape;
      // A mean of nothing is no number, and has no derivative.
      if (takes(arguments_)) check(gives_numbers(arguments_));
    }
  }

 private:
  void check(bool with_gradients) const {
    {
      const at::NoGradGuard no_grad;
      // In this order, as each check relies on the one before: a kernel that writes to its input makes all
      // comparisons below meaningless.
      const Values results = schema();
      strides();
      meta(results);
    }
    if (with_gradients) gradients();
  }

  static bool has_indices(const Values& arguments) {
    // Whole numbers may be positions in another argument, which a smaller shape would not have.
    return std::ranges::any_of(arguments, [](const c10::IValue& argument) {
      return std::ranges::any_of(tensors_of(argument), [](const at::Tensor& tensor) {
        return tensor.defined() && at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
      });
    });
  }

  bool gives_numbers(const Values& arguments) const {
    const at::NoGradGuard no_grad;
    return std::ranges::all_of(call(copied(arguments)), [](const c10::IValue& result) {
      return std::ranges::all_of(tensors_of(result), [](const at::Tensor& tensor) {
        return !tensor.defined() || !tensor.is_floating_point() || at::isfinite(tensor).all().item<bool>();
      });
    });
  }

  // An operator may reject a shape, or values.
  bool takes(const Values& arguments) const {
    const at::NoGradGuard no_grad;
    try {
      call(copied(arguments));
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  Values call(const Values& arguments) const {
    torch::jit::Stack stack = arguments;
    // Through the dispatcher, as any program calls it: so autograd and meta kernels are the registered ones.
    op_.callBoxed(&stack);
    return stack;
  }

  std::string argument(std::size_t i) const {
    return base::concat("argument ", i, " ('", op_.schema().arguments()[i].name(), "')");
  }
  [[noreturn]] void fail(const std::string& what, const std::string& hint = "") const {
    throw CheckError(kWhere, base::concat(name_, ": ", what), hint);
  }

  Values schema() const {
    Values arguments = copied(arguments_);
    const Values before = copied(arguments_);
    Values results = call(arguments);
    const auto& schema = op_.schema();
    if (results.size() != schema.returns().size()) {
      fail(base::concat("gives ", results.size(), " outputs, the schema says ", schema.returns().size()));
    }
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (!is_written(i)) unchanged(i, tensors_of(before[i]), tensors_of(arguments[i]));
    }
    for (std::size_t k = 0; k < results.size(); ++k) {
      for (const at::Tensor& output : tensors_of(results[k])) {
        if (output.defined()) check_sharing(k, output, arguments);
      }
    }
    return results;
  }

  void unchanged(std::size_t i, const Tensors& before, const Tensors& after) const {
    for (std::size_t t = 0; t < before.size(); ++t) {
      if (!before[t].defined()) continue;
      // The comparison of elements below needs equal sizes.
      if (before[t].sizes() != after[t].sizes()) {
        fail(base::concat(argument(i), " was resized from ", text_of(before[t].sizes()), " to ",
                          text_of(after[t].sizes()), ", and the schema does not say that it is written to"));
      }
      const at::Tensor was = before[t].reshape(-1), is = after[t].reshape(-1);
      // equal() says no for NaN, and the loop then passes over those.
      if (at::equal(was, is)) continue;
      for (std::int64_t e = 0; e < was.numel(); ++e) {
        if (at::equal(was[e], is[e])) continue;
        if (was.is_floating_point() && was[e].item<double>() != was[e].item<double>()) continue;  // NaN
        fail(base::concat(argument(i), " was written to: element ", e, " was ", was[e].item(), " and is ",
                          is[e].item(), ", and the schema does not say so"),
             "Tensor(a!) in the schema, or a copy in the kernel");
      }
    }
  }

  void check_sharing(std::size_t k, const at::Tensor& output, const Values& arguments) const {
    // The schema is a promise to autograd: memory that is shared without a word gets neither a view nor a
    // version count. The other way round autograd would make a view of a base that the result does not share.
    const c10::AliasInfo* alias = op_.schema().returns()[k].alias_info();
    bool found = alias == nullptr;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const c10::AliasInfo* other = op_.schema().arguments()[i].alias_info();
      const bool may = alias != nullptr && other != nullptr && alias->beforeSets() == other->beforeSets();
      for (const at::Tensor& input : tensors_of(arguments[i])) {
        // Tensors without bytes may all have the same null address.
        if (!input.defined() || input.nbytes() == 0) continue;
        const bool shares = input.storage().is_alias_of(output.storage());
        if (shares && !may) {
          fail(base::concat("output ", k, " shares memory with ", argument(i),
                            ", and the schema does not say so"),
               "Tensor(a) on both in the schema, or a copy in the kernel");
        }
        found = found || (shares && may);
      }
    }
    if (!found && output.nbytes() > 0) {
      fail(base::concat("the schema says that output ", k,
                        " shares memory with an argument, and it does not"));
    }
  }

  bool is_written(std::size_t i) const {
    const c10::AliasInfo* const alias = op_.schema().arguments()[i].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  Values laid_out(const Form& form) const {
    Values values = copied(arguments_);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (form.shares_elements && is_written(i)) continue;
      values[i] = mapped({values[i]}, [&](const at::Tensor& t) { return form.make(t.detach()); }).front();
    }
    return values;
  }

  void strides() const {
    for (const Form& form : kForms) {
      const Values arguments = laid_out(form), before = laid_out(form), plain = mapped(arguments, dense);
      // A form changes values too, for instance by repeating them, and the operator may reject those.
      if (!takes(plain)) continue;
      const Values expected = call(plain);
      Values results;
      try {
        results = call(arguments);
      } catch (const std::exception& error) {
        fail(base::concat("throws on ", form.name, ", and not on contiguous ones: ", error.what()));
      }
      for (std::size_t k = 0; k < results.size(); ++k) {
        same_values(base::concat("output ", k), form, tensors_of(results[k]), tensors_of(expected[k]));
      }
      for (std::size_t i = 0; i < arguments.size(); ++i) {
        const Tensors were = tensors_of(before[i]), are = tensors_of(arguments[i]);
        if (!is_written(i)) {
          unchanged(i, were, are);
          continue;
        }
        same_values(argument(i), form, are, tensors_of(plain[i]));
        for (std::size_t t = 0; t < were.size(); ++t) nothing_beside(i, form, were[t], are[t]);
      }
    }
  }

  // What lies between the elements of an argument belongs to somebody else.
  void nothing_beside(std::size_t i, const Form& form, const at::Tensor& before,
                      const at::Tensor& after) const {
    const auto beside = [](const at::Tensor& tensor) {
      at::Tensor all = at::empty({0}, tensor.options()).set_(tensor.storage()).clone();
      // The elements may have changed; set to zero on both sides, only what lies between them counts.
      all.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()).zero_();
      return all;
    };
    // One that was resized may lie as it likes.
    if (!before.defined() || before.sizes() != after.sizes() || before.strides() != after.strides()) return;
    if (at::equal(beside(before), beside(after))) return;
    fail(base::concat(argument(i), ": memory between its elements was written to on ", form.name), kHint);
  }

  void same_values(const std::string& what, const Form& form, const Tensors& got,
                   const Tensors& wanted) const {
    if (got.size() != wanted.size()) fail(base::concat(what, " is a list of another length on ", form.name));
    for (std::size_t t = 0; t < got.size(); ++t) {
      if (got[t].defined() != wanted[t].defined()) {
        fail(base::concat(what, " is undefined on ", form.name, " or on contiguous ones only"));
      }
      if (got[t].defined()) same_values(what, form, got[t], wanted[t]);
    }
  }

  void same_values(const std::string& what, const Form& form, const at::Tensor& got,
                   const at::Tensor& wanted) const {
    if (got.sizes() != wanted.sizes()) {
      fail(base::concat(what, " is ", text_of(got.sizes()), " on ", form.name, ", ", text_of(wanted.sizes()),
                        " on contiguous ones"),
           kHint);
    }
    // Not bit by bit: another order of memory may lead to another order of a sum.
    const at::Tensor is = got.reshape(-1).to(at::kDouble), should = wanted.reshape(-1).to(at::kDouble);
    if (at::allclose(is, should, options_.tolerance(), options_.tolerance(), true)) return;
    for (std::int64_t e = 0; e < is.numel(); ++e) {
      if (at::allclose(is[e], should[e], options_.tolerance(), options_.tolerance(), true)) continue;
      fail(base::concat("element ", e, " of ", what, " is ", is[e].item<double>(), " on ", form.name, ", ",
                        should[e].item<double>(), " on contiguous ones"),
           kHint);
    }
  }

  void meta(const Values& real) const {
    const bool has = op_.hasKernelForDispatchKey(c10::DispatchKey::Meta);
    if (!options_.meta()) {
      if (has) fail("has a meta function, and the check was told that it has none");
      return;
    }
    // Composite kernels consist of LibTorch's operators, which have meta functions.
    if (!has && !op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
      fail("has no meta function",
           "meta() in its definition; OpcheckOptions().meta(false) where sizes depend on values");
    }
    const Values results = call(mapped(arguments_, [](const at::Tensor& tensor) {
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    }));
    for (std::size_t k = 0; k < real.size(); ++k) {
      const Tensors got = tensors_of(results[k]), wanted = tensors_of(real[k]);
      if (got.size() != wanted.size())
        fail(base::concat("meta gives another number of tensors for output ", k));
      for (std::size_t t = 0; t < got.size(); ++t) {
        if (got[t].defined() != wanted[t].defined())
          fail(base::concat("output ", k, " is undefined in one of meta and real"));
        if (wanted[t].defined()) same_form(k, got[t], wanted[t]);
      }
    }
  }

  void same_form(std::size_t k, const at::Tensor& meta, const at::Tensor& real) const {
    if (!meta.is_meta())
      fail(base::concat("the meta function gives output ", k, " on ", meta.device().str()));
    if (meta.sizes() != real.sizes()) {
      fail(base::concat("output ", k, " has sizes ", text_of(real.sizes()), ", its meta function says ",
                        text_of(meta.sizes())));
    }
    if (meta.scalar_type() != real.scalar_type()) {
      fail(base::concat("output ", k, " is ", real.scalar_type(), ", its meta function says ",
                        meta.scalar_type()));
    }
    // Strides of a single element mean nothing, and LibTorch itself sets them at will.
    if (real.numel() > 1 && meta.strides() != real.strides()) {
      fail(base::concat("output ", k, " has strides ", text_of(real.strides()), ", its meta function says ",
                        text_of(meta.strides())));
    }
  }

  void gradients() const {
    Tensors inputs;
    std::vector<std::size_t> places;
    bool floating = false, wanted = false;
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      for (const at::Tensor& tensor : tensors_of(arguments_[i])) {
        inputs.push_back(tensor);
        places.push_back(i);
        wanted = wanted || (tensor.defined() && tensor.requires_grad());
      }
    }
    if (!wanted) return;
    const Values outputs = call(copied(arguments_));
    for (const c10::IValue& output : outputs) {
      for (const at::Tensor& tensor : tensors_of(output)) floating = floating || tensor.is_floating_point();
    }
    // A result of whole numbers has no gradient, so it needs no autograd kernel.
    if (!floating) return;
    if (!op_.hasKernelForDispatchKey(c10::DispatchKey::Autograd) &&
        !op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
      fail("has no autograd kernel: a gradient that flows into it is lost without a word",
           "ops::define(), which registers one");
    }
    const auto function = [&](const Tensors& values) {
      Tensors own = values, result;  // what is written to begins anew with each call
      for (std::size_t i = 0; i < own.size(); ++i) {
        if (own[i].defined() && is_written(places[i])) own[i] = own[i].clone();
      }
      for (const c10::IValue& output : call(with_tensors(own, places))) {
        for (const at::Tensor& tensor : tensors_of(output)) result.push_back(tensor);
      }
      return result;
    };
    try {
      // On dense inputs only. Other layouts are compared with those below, which costs one backward and not
      // one for each element.
      gradcheck(function, inputs, options_.gradcheck());
    } catch (const CheckError& error) {
      fail(error.what());
    }
    for (const Form& form : kForms) gradients_on(form, function, inputs, places);
  }

  // Gradients that flow in as one number for all elements, as those of sum() do, and inputs that lie
  // otherwise lead to the gradients of dense ones.
  void gradients_on(const Form& form, const TensorFunction& function, const Tensors& inputs,
                    const std::vector<std::size_t>& places) const {
    Tensors values, plain;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const bool is_given = inputs[i].defined();
      const bool is_kept = !is_given || (form.shares_elements && is_written(places[i]));
      const at::Tensor value = is_kept ? inputs[i] : form.make(inputs[i].detach());
      plain.push_back(is_given ? dense(value).set_requires_grad(inputs[i].requires_grad()) : value);
      values.push_back(is_given ? value.detach().set_requires_grad(inputs[i].requires_grad()) : value);
    }
    if (!takes(with_tensors(plain, places))) return;
    Tensors got, wanted;
    try {
      wanted = gradients_of(function, plain, &dense);
      got = gradients_of(function, values, [](const at::Tensor& t) { return t; });
    } catch (const std::exception& error) {
      fail(base::concat("forward or backward throws on ", form.name, ": ", error.what()));
    }
    for (std::size_t i = 0, next = 0; i < inputs.size(); ++i) {
      if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
      same_values(base::concat("the gradient of ", argument(places[i])), form, Tensors{got[next]},
                  Tensors{wanted[next]});
      ++next;
    }
  }

  static Tensors gradients_of(const TensorFunction& function, const Tensors& inputs,
                              at::Tensor (*form)(const at::Tensor&)) {
    Tensors leaves, ends, grad_outputs;
    for (const at::Tensor& input : inputs) {
      if (input.defined() && input.requires_grad()) leaves.push_back(input);
    }
    for (const at::Tensor& output : function(inputs)) {
      if (!output.defined() || !output.requires_grad()) continue;
      ends.push_back(output);
      const at::Tensor numbers = at::arange(1, output.numel() + 1, output.options()).view(output.sizes());
      grad_outputs.push_back(form(expanded(numbers)));
    }
    return torch::autograd::grad(ends, leaves, grad_outputs, std::nullopt, false, /*allow_unused=*/true);
  }

  // The arguments with these tensors, which belong to the arguments `places`.
  Values with_tensors(const Tensors& tensors, const std::vector<std::size_t>& places) const {
    Values arguments = arguments_;
    std::vector<Tensors> grouped(arguments.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) grouped[places[i]].push_back(tensors[i]);
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].isTensor()) arguments[i] = grouped[i].front();
      if (arguments[i].isTensorList()) arguments[i] = grouped[i];
    }
    return arguments;
  }

  c10::OperatorHandle op_;
  std::string name_;
  Values arguments_;
  const OpcheckOptions& options_;
};

}  // namespace

void opcheck(const std::string& name, const std::vector<c10::IValue>& arguments,
             const OpcheckOptions& options) {
  OperatorCheck(name, arguments, options).run();
}

}  // namespace cohort::ops
