#include "cohort/net/tls_options.h"

#include <string>

#include "cohort/base/env.h"
#include "cohort/base/error.h"

namespace cohort::net {

std::optional<TlsOptions> TlsOptions::of_process() {
  const std::optional<std::string> certificate = base::env_string("COHORT_TLS_CERTIFICATE");
  const std::optional<std::string> key = base::env_string("COHORT_TLS_KEY");
  const std::optional<std::string> authorities = base::env_string("COHORT_TLS_AUTHORITIES");
  if (!certificate && !key && !authorities) return std::nullopt;
  if (certificate && key && authorities) return TlsOptions{*certificate, *key, *authorities};
  const char* const missing = !certificate ? "COHORT_TLS_CERTIFICATE"
                              : !key       ? "COHORT_TLS_KEY"
                                           : "COHORT_TLS_AUTHORITIES";
  throw UsageError("net.tls",
                   base::concat(missing, " is not set, and another of the three variables for TLS is"),
                   "set COHORT_TLS_CERTIFICATE, COHORT_TLS_KEY and COHORT_TLS_AUTHORITIES, or none of them");
}

}  // namespace cohort::net
