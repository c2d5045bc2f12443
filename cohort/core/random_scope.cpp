// A scope puts its generator into a record of the thread, and switches on a dispatch key whose kernels hand
// it to operators. The end of the scope restores the record and the key that were there. A generator is made
// at the first draw, so a scope in which nothing draws costs little. Always: on the CPU, a scope never writes
// to LibTorch's global generator. A program without scopes gets no kernels.
#include "cohort/core/random_scope.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <list>
#include <string>

#include "cohort/base/random.h"

namespace cohort::core {

// Note [Handing operators a generator]
// Operators take their generator as an argument that modules leave empty. A dispatch key that LibTorch keeps
// free, CustomRNGKeyId, is switched on for the thread; under it every operator with such an argument gets a
// kernel that fills it in, and continues below. All other operators fall through. Operators without the
// argument that draw on the CPU do so by calling one that has it (dropout calls bernoulli_).
struct RandomSource {
  static RandomScope::Source& of_thread() {
    thread_local RandomScope::Source source;
    return source;
  }
  static const at::Generator& generator() {
    RandomScope::Source& source = of_thread();
    if (source.is_open && !source.generator.defined()) {
      source.generator = at::make_generator<at::CPUGeneratorImpl>(source.seed);
    }
    return source.generator;
  }
};

namespace {

constexpr auto kKey = c10::DispatchKey::CustomRNGKeyId;

void fill_in(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (keys.has_backend(c10::BackendComponent::CPUBit)) {
    const auto& arguments = op.schema().arguments();
    const std::size_t first = stack->size() - arguments.size();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = (*stack)[first + i];
      if (arguments[i].name() != "generator") continue;
      if (!value.isNone()) {
        if (value.toGenerator() == at::detail::getDefaultCPUGenerator()) value = RandomScope::global();
        continue;
      }
      const at::Generator& own = RandomSource::generator();
      if (own.defined()) {
        value = own;
      } else if (const at::Generator& global = RandomSource::of_thread().global; global.defined()) {
        value = global;
      }
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

// The kernels are registered when the first scope begins: a program without scopes is left as it is.
void register_kernels() {
  static const bool once = [] {
    // Never destroyed: what is registered stays until the process ends, whatever is destroyed before. A
    // static pointer to it is what the leak sanitizer looks for.
    static auto* const kept = new std::list<torch::Library>();
    auto& libraries = *kept;
    auto& all = libraries.emplace_back(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFallthrough());
    auto& aten = libraries.emplace_back(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      constexpr std::string_view kPrefix = "aten::";
      if (name.name.rfind(kPrefix, 0) != 0) continue;
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op) continue;
      for (const c10::Argument& argument : op->schema().arguments()) {
        if (argument.name() != "generator") continue;
        std::string full = name.name.substr(kPrefix.size());
        if (!name.overload_name.empty()) full += "." + name.overload_name;
        aten.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fill_in>());
        break;
      }
    }
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace

std::uint64_t RandomKey::generator_seed() const {
  const std::uint64_t of_step = base::RandomStream(seed, rank, step, base::Purpose::kGenerator).next_u64();
  return base::RandomStream(of_step, layer, part, base::Purpose::kPart).next_u64() >> 1;
}

RandomKey RandomKey::draw() {
  at::Generator generator = RandomScope::current();
  if (!generator.defined()) generator = RandomScope::global();
  const std::lock_guard lock(generator.mutex());
  return {.seed = at::check_generator<at::CPUGeneratorImpl>(generator)->random64()};
}

RandomScope::RandomScope(const RandomKey& key, c10::Device device) {
  const std::uint64_t seed = key.generator_seed();
  if (!device.is_cpu()) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
  enter({.generator = {}, .seed = seed, .is_open = true});
}

RandomScope::RandomScope(at::Generator generator) {
  const bool is_open = generator.defined();
  enter({.generator = std::move(generator), .seed = 0, .is_open = is_open});
}

RandomScope::RandomScope(at::Generator generator, at::Generator global) {
  const bool is_open = generator.defined();
  enter({.generator = std::move(generator), .seed = 0, .is_open = is_open, .global = std::move(global)});
}

void RandomScope::enter(Source source) {
  register_kernels();
  // What stands for the global generator does so in scopes within, too.
  if (!source.global.defined()) source.global = RandomSource::of_thread().global;
  const bool is_open = source.is_open || source.global.defined();
  before_ = std::exchange(RandomSource::of_thread(), std::move(source));
  key_before_ = c10::impl::tls_is_dispatch_key_included(kKey);
  c10::impl::tls_set_dispatch_key_included(kKey, is_open);
}

RandomScope::~RandomScope() {
  RandomSource::of_thread() = std::move(before_);
  c10::impl::tls_set_dispatch_key_included(kKey, key_before_);
}

at::Generator RandomScope::current() {
  return RandomSource::generator();
}

at::Generator RandomScope::global() {
  const at::Generator& global = RandomSource::of_thread().global;
  return global.defined() ? global : at::detail::getDefaultCPUGenerator();
}

}  // namespace cohort::core
