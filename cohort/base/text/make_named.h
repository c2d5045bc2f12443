#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/error_context.h"
#include "cohort/base/text/named_options.h"

namespace cohort::base {

/// Returns `make(options)`, where `options` are `given`, handed to `owner` ("optimizer 'lion'") under `key`
/// ("optim.options"). What `make` throws is thrown as with_context() does. Throws: UsageError for a null
/// result; ConfigError for an option that `make` did not read, unless it is one of `ignored`.
template <typename Foreign, typename Make>
auto make_named(std::string_view where, const std::string& key, const std::string& owner,
                const NamedOptions& given, const Make& make,
                std::initializer_list<std::string_view> ignored = {}) {
  const NamedOptions options = given.handed_to(key, owner);
  auto made = with_context<Foreign>(where, "making " + owner, [&] { return make(options); });
  if constexpr (requires { made == nullptr; }) {
    if (made == nullptr) throw UsageError(where, concat("the factory of ", owner, " returned nothing"));
  }
  options.reject_unread(ignored);
  return made;
}

/// Returns a factory that calls `make` and takes no options of its own: its first argument has a `name`, and
/// `extra`, which must be empty. `kind` ("optimizer") and `key` ("optim.options") stand in the message.
/// Throws: ConfigError naming the first option in `extra`.
template <typename Make>
auto without_extra(std::string kind, std::string key, Make make) {
  return [kind = std::move(kind), key = std::move(key), make = std::move(make)](const auto& options,
                                                                                auto&&... rest) {
    options.extra.handed_to(key, concat(kind, " '", options.name, "'")).reject_unread();
    return make(options, std::forward<decltype(rest)>(rest)...);
  };
}

}  // namespace cohort::base
