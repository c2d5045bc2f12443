#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

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
  options.refuse_unread(ignored);
  return made;
}

}  // namespace cohort::base
